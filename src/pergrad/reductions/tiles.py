"""Materialises gradients piece by piece within a memory bound; works for every factor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from pergrad.factors import ALL, Factor, add_up
from pergrad.runtime import promoted, wide

__all__ = [
    "as_rows",
    "at_once",
    "is_one_piece",
    "is_small",
    "sample_tiles",
    "whole_batch_tiles",
    "wide_dtype",
]


def at_once(bytes_each: int, bound: int) -> int:
    """Counts the pieces of `bytes_each` that fit into the bound; at least one."""
    return max(1, bound // max(bytes_each, 1))


def as_rows(gradients: Tensor) -> Tensor:
    """(n, *weight) -> (n, d)."""
    return gradients.flatten(1) if gradients.dim() > 1 else gradients.unsqueeze(1)


def is_small(factor: Factor) -> bool:
    """Whether launching a kernel for this gradient takes longer than running it."""
    return prod(factor.shape[1:]) <= _SMALL


_SMALL = 2**14


def wide_dtype(factors: Sequence[Factor]) -> torch.dtype:
    """Returns the dtype in which to sum the gradients of one weight."""
    dtype = factors[0].dtype
    for factor in factors[1:]:
        dtype = promoted(dtype, factor.dtype)
    return wide(dtype)


def is_one_piece(factors: Sequence[Factor], bound: int) -> bool:
    """Whether the gradients of all samples fit into the bound."""
    n, *shape = factors[0].shape
    each = prod(shape) + max([f.scratch for f in factors])
    return n * each * wide_dtype(factors).itemsize <= bound


def sample_tiles(factors: Sequence[Factor], bound: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields (samples, rows, gradients): as many samples as fit, or rows of one sample if none fits."""
    n, *shape = factors[0].shape
    dtype = wide_dtype(factors)
    room = bound // dtype.itemsize
    each = prod(shape) + max(f.scratch for f in factors)
    if each <= room or len(shape) < 1 or shape[0] < 2:
        step = max(1, min(n, room // max(each, 1)))
        for start in range(0, n, step):
            samples = slice(start, min(start + step, n))
            whole = step == n
            yield samples, ALL, _piece(factors, ALL if whole else samples, ALL, dtype)
    else:
        step = max(1, shape[0] * room // each)
        for sample in range(n):
            for start in range(0, shape[0], step):
                samples, rows = slice(sample, sample + 1), slice(start, min(start + step, shape[0]))
                yield samples, rows, _piece(factors, samples, rows, dtype)


def whole_batch_tiles(factors: Sequence[Factor], bound: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, gradients of all samples in these rows): as many rows as fit, at least one."""
    n, *shape = factors[0].shape
    dtype = wide_dtype(factors)
    room = bound // dtype.itemsize
    if is_one_piece(factors, bound) or len(shape) < 1:
        yield ALL, _piece(factors, ALL, ALL, dtype)
        return
    scratch = max(f.scratch for f in factors)  # independent of the number of rows
    at_once = max(1, room // scratch) if scratch else n
    step = max(1, shape[0] * room // max(n * prod(shape), 1))
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        some = [slice(first, first + at_once) for first in range(0, n, at_once)]
        pieces = [
            _piece(factors, samples if len(some) > 1 else ALL, rows, dtype) for samples in some
        ]
        yield rows, pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _piece(factors: Sequence[Factor], samples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
    if samples == ALL and rows == ALL:
        return add_up(factors, dtype)
    return add_up([f.part(samples, rows) for f in factors], dtype)
