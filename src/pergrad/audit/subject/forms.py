"""Describes the types and shapes of items, and finds those that most items have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

__all__ = ["form_of", "kind_of", "most_alike"]

T = TypeVar("T")


def form_of(item: Any) -> str:
    """Describes the types and shapes in an item.

    >>> import torch
    >>> form_of((torch.zeros(2, 3), 4, {"text": "a"}))
    '(float32 (2, 3), int, {text: str})'
    """
    if isinstance(item, Tensor | np.ndarray):
        return f"{str(item.dtype).removeprefix('torch.')} {tuple(item.shape)}"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key}: {form_of(value)}' for key, value in item.items())}}}"
    if isinstance(item, list | tuple):
        return f"({', '.join(map(form_of, item))})"
    return type(item).__name__


def kind_of(item: Any) -> str:
    """Describes the types of an item and its parts, whatever their sizes.

    >>> kind_of(([1, 2, 3], "a")), kind_of({"label": None})
    ('tuple(list, str)', 'dict(label: NoneType)')
    """
    name = type(item).__name__
    if isinstance(item, Mapping):
        return f"{name}({', '.join(f'{k}: {type(part).__name__}' for k, part in item.items())})"
    if isinstance(item, tuple):
        return f"{name}({', '.join(type(part).__name__ for part in item)})"
    return name


def most_alike(items: Sequence[T], of: Callable[[T], Hashable] = form_of) -> list[T]:
    """Returns the items with the most common value of a function, in order; of equally common ones the first.

    >>> most_alike([None, 1, 2], kind_of)
    [1, 2]
    """
    found = [of(item) for item in items]
    common = Counter(found).most_common(1)
    return [item for item, value in zip(items, found, strict=True) if value == common[0][0]]
