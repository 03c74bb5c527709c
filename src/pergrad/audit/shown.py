"""What the samples look like: a picture or a text of those that a report shows."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from pergrad.audit.files import write_in_place
from pergrad.audit.loading import item_of
from pergrad.audit.spec import Spec
from pergrad.errors import AuditError, InterruptedAuditError

__all__ = ["picture_of", "write_shown"]

_LARGEST = 512  # pixels of a side; a report has many pictures in it


def write_shown(folder: Path, spec: Spec, indices: Iterable[int]) -> list[str]:
    """A file for each sample; what could not be shown is told in words and does not stop the audit."""
    if spec.show is None:
        return []
    folder.mkdir(exist_ok=True)
    problems = []
    for index in indices:
        try:
            found = spec.show(item_of(spec.dataset, int(index)))
            if isinstance(found, str):
                write_in_place(folder / f"{index}.txt", found.encode())
            else:
                held = io.BytesIO()
                picture_of(found).save(held, format="PNG")
                write_in_place(folder / f"{index}.png", held.getvalue())
        except InterruptedAuditError:  # no space left
            raise
        except Exception as error:
            problems.append(f"sample {index} could not be shown: {type(error).__name__}: {error}")
    return problems


def picture_of(found: Any) -> Image.Image:
    """A PIL image as it is; (H, W), (C, H, W) or (H, W, 3) with values in 0 to 255, or as far as they go.

    >>> picture_of(np.zeros((8, 6))).size
    (6, 8)
    """
    if isinstance(found, Image.Image):
        image = found if found.mode in ("L", "RGB", "RGBA") else found.convert("RGB")
    else:
        image = Image.fromarray(_pixels(found))
    if max(image.size) > _LARGEST:
        image = image.copy()
        image.thumbnail((_LARGEST, _LARGEST))
    return image


def _pixels(found: Any) -> np.ndarray:
    if isinstance(found, Tensor):
        found = found.detach().cpu()
        found = (found.float() if found.is_floating_point() else found).numpy()
    if not isinstance(found, np.ndarray):
        raise AuditError(
            f"spec.show must return a text, a PIL image, a tensor or an array, got {type(found).__name__}"
        )
    values = found
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = np.moveaxis(values, 0, 2)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3)) or not values.size:
        raise AuditError(
            f"spec.show must return an image of shape (H, W), (C, H, W) or (H, W, 3), got {found.shape}"
        )
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    values = np.nan_to_num(values.astype(np.float64))
    low, high = min(0.0, float(values.min())), float(values.max())
    # 0 to 1 and 0 to 255 are usual, and stay comparable between pictures; others are stretched.
    if low == 0.0:
        high = 1.0 if high <= 1 else 255.0 if 16 < high <= 255 else high
    scaled = (values - low) / (high - low if high > low else 1.0) * 255
    return scaled.round().astype(np.uint8)
