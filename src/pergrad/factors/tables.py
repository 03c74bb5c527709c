"""Sums the gradients of positions by the row of a table that each position looked up."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor

from pergrad.factors.choosing import chooser_of
from pergrad.runtime.allocation import is_large, zeros
from pergrad.runtime.precision import bmm, in_dtype
from pergrad.runtime.tracing import operation

__all__ = ["TABLE_SUM_WAYS", "sums_by_row"]


def sums_by_row(index: Tensor, g: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Σ_t g[n,t] [index[n,t] = r], (n, rows, i) in `dtype`; an index (t,) is that of all samples."""
    n, t, i = g.shape
    columns = n * i if index.dim() == 1 else i  # that one product with the index multiplies
    way = chooser_of(g).pick("sums by row", (t, rows, i, columns))
    return TABLE_SUM_WAYS[way](index, g, rows, dtype)


def _added(index: Tensor, g: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Adds one position after the other; on a GPU, additions to the same row wait for each other."""
    g = in_dtype(g, dtype)
    if index.dim() == 1:
        return g.new_zeros(len(g), rows, g.shape[2]).index_add_(1, index, g)
    found = _large_added_by_sample if is_large((len(g), rows, g.shape[2]), g) else _added_by_sample
    return found(index, g, rows)


def _added_by_sample(index: Tensor, g: Tensor, rows: int) -> Tensor:
    n, _, width = g.shape
    first_row = torch.arange(n, device=g.device).unsqueeze(1) * rows
    flat = zeros((n * rows, width), g)
    flat.index_add_(0, (index + first_row).flatten(), g.flatten(0, 1))
    return flat.view(n, rows, width)


# A compiled step calls this as it is: inductor's version took ten times as long, writing to fresh pages.
_large_added_by_sample = operation(
    "row_sums", lambda index, g, rows: g.new_empty(g.shape[0], rows, g.shape[2])
)(_added_by_sample)


def _multiplied(index: Tensor, g: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Multiplies by a matrix of zeros and ones, which tells the row of each position.

    A gradient that is not finite spoils the other rows of its column too, since 0 · NaN is NaN.
    """
    numbers = torch.arange(rows, device=index.device)
    is_row = (index.unsqueeze(-1) == numbers).to(g.dtype)  # (..., t, rows)
    if index.dim() == 2:
        return bmm(is_row.mT, g, dtype)
    n, t, i = g.shape
    if g.stride(2) == 1 and i >= _WIDE:  # samples side by side would be a copy of g
        return bmm(is_row.T.expand(n, rows, t), g, dtype)
    pieces = gcd(t, _PIECES)
    each = g.mT.reshape(n * i, pieces, t // pieces).transpose(0, 1)
    found = bmm(each, is_row.view(pieces, t // pieces, rows), dtype).sum(0)
    return found.view(n, i, rows).mT


_WIDE = 16  # columns of one sample that fill the lanes of a processor
_PIECES = 64  # a product of few rows and columns and many positions leaves most of a GPU idle


TABLE_SUM_WAYS: dict[str, Callable[[Tensor, Tensor, int, torch.dtype], Tensor]] = {
    "added": _added,
    "multiplied": _multiplied,
}
