"""Prepares previews for the page: a thumbnail as a data URI, or an excerpt of a text."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

__all__ = ["Shown", "shown"]

_EXCERPT = 280  # characters of an excerpt
_WHOLE = 6000  # characters of a text in the page
_PIXELS = 64  # images up to this size are shown with sharp pixels, larger ones smoothed


@dataclass(frozen=True)
class Shown:
    """A picture as a data URI, or a text and its excerpt; both None if there is no preview."""

    uri: str | None = None
    width: int = 0
    height: int = 0
    has_pixels: bool = False  # so small that its pixels are drawn sharp
    excerpt: str | None = None
    whole: str | None = None  # None if the excerpt is the whole text
    left_out: int = 0  # characters after `whole`


def shown(row: Mapping[str, Any] | None, *, size: int) -> Shown:
    """Converts a row of `shown.parquet`; a picture is at most `size` pixels wide and high.

    A missing or damaged row gives an empty preview: the other findings about the sample are still valid.
    """
    if row is None:
        return Shown()
    return _picture(row, size) if row["text"] is None else _text(row["text"])


def _picture(row: Mapping[str, Any], size: int) -> Shown:
    width, height = row["width"], row["height"]
    try:
        small = Image.frombytes(row["mode"], (width, height), row["pixels"])
    except (ValueError, TypeError):
        return Shown()
    small.thumbnail((size, size))
    held = io.BytesIO()
    is_photo = max(small.size) > _PIXELS and small.mode == "RGB"
    if is_photo:
        small.save(held, format="JPEG", quality=84, optimize=True)
    else:
        small.save(held, format="PNG", optimize=True)
    data = base64.b64encode(held.getvalue()).decode("ascii")
    uri = f"data:image/{'jpeg' if is_photo else 'png'};base64,{data}"
    return Shown(uri, small.width, small.height, max(width, height) <= _PIXELS)


def _text(text: str) -> Shown:
    text = text.strip()
    if len(text) <= _EXCERPT:
        return Shown(excerpt=text or "(an empty text)")
    cut = text[:_EXCERPT].rsplit(None, 1)[0] if " " in text[:_EXCERPT] else text[:_EXCERPT]
    return Shown(excerpt=f"{cut} …", whole=text[:_WHOLE], left_out=max(0, len(text) - _WHOLE))
