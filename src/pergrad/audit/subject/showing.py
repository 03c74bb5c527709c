"""Chooses how to show an item: an image-shaped tensor as a picture, a row of numbers as a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["inferred_show"]

_LEAST_SIDE = 4  # pixels of a picture; smaller arrays are numbers
_MOST_NUMBERS = 24  # of a row in words
_TEXTS = ("text", "sentence", "content", "review", "question", "prompt", "input")


def inferred_show(
    dataset: Any, classes: Sequence[str] | None = None
) -> Callable[[Any], Any] | None:
    """Returns a function that shows an item, or None if nothing in the first item can be shown.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> show = inferred_show(TensorDataset(torch.zeros(2, 3), torch.zeros(2)))
    >>> show((torch.tensor([1.0, 2.5, 0.0]), torch.tensor(0)))
    '1, 2.5, 0'
    """
    own = getattr(dataset, "shown", None)  # data sets of pergrad's own, from files
    if callable(own):
        return own
    try:
        part = _inputs(dataset[0])
    except Exception:
        return None
    if part is None:
        return None
    return lambda item: _shown(_inputs(item))


def _inputs(item: Any) -> Any:
    """Returns the part of an item that is the input: the first of a tuple, the text or image of a dict."""
    if isinstance(item, Mapping):
        found = [key for key in _TEXTS if isinstance(item.get(key), str)]
        found += [key for key, part in item.items() if hasattr(part, "convert")]
        found += [key for key, part in item.items() if _is_array(part) and np.ndim(part) > 0]
        found += [key for key, part in item.items() if isinstance(part, str)]
        return item[found[0]] if found else None
    if isinstance(item, tuple | list) and item and not isinstance(item[0], int | float):
        return _inputs(item[0]) if isinstance(item[0], Mapping | tuple | list) else item[0]
    return item


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor | np.ndarray)


def is_picture(shape: Sequence[int]) -> bool:
    """Whether an array of this shape is a picture: (H, W), (1 or 3, H, W) or (H, W, 1 or 3)."""
    if len(shape) == 2:
        return min(shape) >= _LEAST_SIDE
    if len(shape) == 3:
        return (shape[0] in (1, 3) and min(shape[1:]) >= _LEAST_SIDE) or (
            shape[2] in (1, 3) and min(shape[:2]) >= _LEAST_SIDE
        )
    return False


def _shown(part: Any) -> Any:
    if isinstance(part, str) or hasattr(part, "convert"):
        return part
    if _is_array(part):
        is_real = part.is_floating_point() if isinstance(part, Tensor) else part.dtype.kind == "f"
        is_bytes = str(part.dtype).endswith("uint8")
        if is_picture(tuple(part.shape)) and (is_real or is_bytes):
            return part
        numbers = np.asarray(part.detach().cpu() if isinstance(part, Tensor) else part).ravel()
        words = ", ".join(f"{value:.4g}" for value in numbers[:_MOST_NUMBERS].tolist())
        return words + (f", ... ({len(numbers):,} numbers)" if len(numbers) > _MOST_NUMBERS else "")
    return str(part)
