"""Samples as they are shown: a thumbnail within the page, or a text cut to size."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

__all__ = ["Shown", "shown"]

_EXCERPT = 280  # characters of a text that are shown at once
_WHOLE = 6000  # characters that are shown at all
_PIXELS = 64  # images up to this size are shown with their pixels, larger ones smoothed


@dataclass(frozen=True)
class Shown:
    """A picture as a data URI, or a text with its beginning; neither where there is nothing to show."""

    uri: str | None = None
    width: int = 0
    height: int = 0
    has_pixels: bool = False  # so small that its pixels are to be seen
    excerpt: str | None = None
    whole: str | None = None  # where the excerpt is not all of it
    left_out: int = 0  # characters beyond even that


def shown(folder: Path, index: int, *, size: int) -> Shown:
    """What `shown/<index>` of a results folder holds, a picture at most `size` pixels wide and high.

    A file that is missing or damaged gives an empty one: the other findings about the sample still hold.
    """
    picture, text = folder / "shown" / f"{index}.png", folder / "shown" / f"{index}.txt"
    if picture.exists():
        return _picture(picture, size)
    if text.exists():
        return _text(text.read_text(encoding="utf-8", errors="replace"))
    return Shown()


def _picture(path: Path, size: int) -> Shown:
    try:
        with Image.open(path) as image:
            image.load()
            small = image.copy()
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
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
    return Shown(uri, small.width, small.height, max(image.size) <= _PIXELS)


def _text(text: str) -> Shown:
    text = text.strip()
    if len(text) <= _EXCERPT:
        return Shown(excerpt=text or "(an empty text)")
    cut = text[:_EXCERPT].rsplit(None, 1)[0] if " " in text[:_EXCERPT] else text[:_EXCERPT]
    return Shown(excerpt=f"{cut} …", whole=text[:_WHOLE], left_out=max(0, len(text) - _WHOLE))
