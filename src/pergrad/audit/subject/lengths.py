"""Sorts samples into buckets by length, so that batches of a token budget have little padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from pergrad.errors import AuditError

__all__ = ["bucket_lengths", "by_bucket", "length_of"]

_SHORTEST = 16  # tokens; shorter samples share one bucket


def length_of(item: Any) -> int:
    """Returns the number of tokens of an item: of its `input_ids`, or along the first dimension of its input.

    >>> length_of({"input_ids": [1, 2, 3]}), length_of(([1, 2], 0))
    (3, 2)
    """
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise AuditError(
                f"an item has no input_ids, only {list(item)}: set spec.length, which returns its tokens"
            )
        return len(item["input_ids"])
    if isinstance(item, tuple) and item:
        return length_of(item[0])
    if isinstance(item, Tensor | np.ndarray):
        return int(item.shape[0]) if item.ndim else 1
    if isinstance(item, list | str):
        return len(item)
    raise AuditError(
        f"an item of type {type(item).__name__} has no length: set spec.length, which returns its tokens"
    )


def bucket_lengths(lengths: np.ndarray) -> np.ndarray:  # (n,) -> (n,)
    """Rounds lengths up to 16, 24, 32, 48, 64, 96, ...: a bucket has at most a third of padding.

    >>> bucket_lengths(np.array([0, 16, 17, 25, 100]))
    array([ 16,  16,  24,  32, 128])
    """
    power = 2 ** np.ceil(np.log2(np.maximum(lengths, _SHORTEST))).astype(np.int64)
    return np.where(np.maximum(lengths, _SHORTEST) <= power * 3 // 4, power * 3 // 4, power)


def by_bucket(
    indices: np.ndarray, length: Callable[[int], int]
) -> tuple[np.ndarray, np.ndarray]:  # (n,), (n,)
    """Returns the indices sorted by bucket, in order within each, and the length of each one's bucket."""
    found = bucket_lengths(np.array([length(index) for index in indices.tolist()], dtype=np.int64))
    order = np.argsort(found, kind="stable")
    return indices[order], found[order]
