"""Makes previews, a picture or a text of each sample that a report shows, as rows of one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image
from torch import Tensor

from pergrad.audit.streaming.loading import item_of
from pergrad.audit.subject.places import told
from pergrad.audit.subject.texts import as_text
from pergrad.errors import AuditError

__all__ = ["Picture", "picture_of", "preview_table"]

_LARGEST = 256  # pixels per side; a report shows previews smaller
_LISTED = 5  # samples without a preview
_COLUMNS = {
    "index": pa.int64(),
    "text": pa.string(),
    "mode": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "pixels": pa.binary(),
}


class Picture(NamedTuple):
    """Raw pixels in Pillow's layout; encoding a file for each would take longer than the analysis."""

    mode: str  # L, RGB or RGBA
    width: int
    height: int
    pixels: bytes  # row by row, a byte a channel


def preview_table(
    dataset: Any, show: Callable[[Any], Any], indices: Iterable[int]
) -> tuple[pa.Table, list[str]]:
    """Returns a row per preview, and a note per reason why some have none: that stops no audit."""
    rows: list[tuple[Any, ...]] = []
    without: dict[str, list[int]] = {}
    for index in indices:
        try:
            found = show(item_of(dataset, int(index)))
            is_text = isinstance(found, str)
            rows.append(
                (index, as_text(found), *[None] * 4)
                if is_text
                else (index, None, *picture_of(found))
            )
        except Exception as error:
            why = str(error) if isinstance(error, AuditError) else told(error)
            without.setdefault(why, []).append(int(index))
    columns = zip(*rows, strict=True) if rows else [[]] * len(_COLUMNS)
    arrays = [pa.array(c, t) for c, t in zip(columns, _COLUMNS.values(), strict=True)]
    problems = [f"no preview of {_listed(indices)}: {why}" for why, indices in without.items()]
    return pa.table(arrays, names=list(_COLUMNS)), problems


def _listed(indices: list[int]) -> str:
    if len(indices) == 1:
        return f"sample {indices[0]}"
    some = ", ".join(map(str, indices[:_LISTED])) + (", ..." if len(indices) > _LISTED else "")
    return f"{len(indices):,} samples ({some})"


def picture_of(found: Any) -> Picture:
    """Converts a PIL image, or an array of shape (H, W), (C, H, W) or (H, W, 3), to 8-bit pixels.

    Values within 0 to 1, or 0 to 255, keep that scale; other ranges are stretched.

    >>> picture_of(np.zeros((8, 6)))[:3]
    ('L', 6, 8)
    """
    if isinstance(found, Image.Image):
        image = found if found.mode in ("L", "RGB", "RGBA") else found.convert("RGB")
    else:
        pixels = _pixels(found)
        height, width = pixels.shape[:2]
        if max(height, width) <= _LARGEST:
            return Picture("L" if pixels.ndim == 2 else "RGB", width, height, pixels.tobytes())
        image = Image.fromarray(pixels)
    if max(image.size) > _LARGEST:
        image = image.copy()
        image.thumbnail((_LARGEST, _LARGEST))
    return Picture(image.mode, image.width, image.height, image.tobytes())


def _pixels(found: Any) -> np.ndarray:  # (H, W) or (H, W, 3) uint8
    if isinstance(found, Tensor):
        found = found.detach().cpu()
        found = (found.float() if found.is_floating_point() else found).numpy()
    if not isinstance(found, np.ndarray):
        raise AuditError(
            f"spec.show must return a string, a PIL image, a tensor or an array, got {type(found).__name__}"
        )
    values = found
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3)) or not values.size:
        raise AuditError(
            f"spec.show must return an image of shape (H, W), (C, H, W) or (H, W, 3), got {found.shape}"
        )
    if values.dtype == np.uint8:
        return values
    values = values.astype(np.float64)
    low, high = values.min(), values.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        values = np.nan_to_num(values)
        low, high = values.min(), values.max()
    low = min(0.0, low)
    # The common ranges 0 to 1 and 0 to 255 stay comparable between pictures; others are stretched.
    if low == 0.0:
        high = 1.0 if high <= 1 else 255.0 if 16 < high <= 255 else high
    scaled = (values - low) * (255 / (high - low if high > low else 1.0))
    return scaled.round().astype(np.uint8)
