"""Defines factors made of rows: table look-ups, rows that belong to samples, and experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pergrad.factors.base import ALL, Dense, Factor
from pergrad.factors.products import (
    ElementProduct,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
)
from pergrad.factors.tables import sums_by_row
from pergrad.runtime import internals
from pergrad.runtime.precision import wide
from pergrad.runtime.tracing import is_traced

__all__ = ["ByOwner", "RowSum", "Stacked", "Wrapper", "owned"]

_SMALL = Dense | PositionSum | ElementProduct | NormalizedProduct


@dataclass(eq=False)
class RowSum(Factor):
    """G_n[r] = Σ_t g[n,t] [index[n,t] = r], of shape (rows, i): the gradient of a table look-up."""

    index: Tensor  # (n, t)
    grad_output: Tensor  # (n, t, i)
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grad_output.shape[0], self.rows, self.grad_output.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_output.dtype

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return sums_by_row(self.index, self.grad_output, self.rows, dtype or self.dtype)

    def part(self, samples: slice, rows: slice = ALL) -> RowSum:
        index, g = self.index[samples], self.grad_output[samples]
        start, stop, _ = rows.indices(self.rows)
        if stop - start == self.rows:
            return RowSum(index, g, self.rows)
        is_inside = (index >= start) & (index < stop)
        g = g.where(is_inside.unsqueeze(-1), 0)
        return RowSum((index - start).clamp(0, stop - start - 1), g, stop - start)

    def coalesced(self, dtype: torch.dtype) -> RowSum:
        """Sums repeated rows of a sample into their first occurrence; the other slots are zero."""
        index, order = self.index.sort(dim=1, stable=True)
        is_first = torch.ones_like(index, dtype=torch.bool)
        is_first[:, 1:] = index[:, 1:] != index[:, :-1]
        slot = (is_first.cumsum(1) - 1).unsqueeze(-1).expand_as(self.grad_output)
        g = self.grad_output.to(dtype).gather(1, order.unsqueeze(-1).expand_as(slot))
        rows = index.new_zeros(index.shape).scatter_(1, slot[..., 0], index) if g.numel() else index
        return RowSum(rows, torch.zeros_like(g).scatter_add_(1, slot, g), self.rows)


@dataclass(eq=False)
class Wrapper(Factor):
    """Wraps another factor, whose samples are rows or matrices of this one."""

    is_by_sample = False
    each: Factor

    @property
    def dtype(self) -> torch.dtype:
        return self.each.dtype

    @property
    def device(self) -> torch.device:
        return self.each.device

    @property
    def size(self) -> int:
        return self.each.size


@dataclass(eq=False)
class ByOwner(Wrapper):
    """G_n = Σ_r F_r [owner[r] = n]: sums the rows of another factor that belong to sample n."""

    owner: Tensor  # (rows of `each`,)
    samples: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.samples, *self.each.shape[1:])

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.grouped(dtype).materialize(dtype)

    def part(self, samples: slice, rows: slice = ALL) -> Factor:
        return self.grouped(wide(self.dtype)).part(samples, rows)

    def transposed(self) -> ByOwner:
        return ByOwner(self.each.transposed(), self.owner, self.samples)

    def grouped(self, dtype: torch.dtype | None = None) -> Factor:
        """Concatenates the rows of each sample along the positions, padded with zeros; sums small ones."""
        if isinstance(self.each, _SMALL):  # summing is cheaper than padding
            rows = self.each.materialize(dtype)
            total = rows.new_zeros(self.samples, *rows.shape[1:])
            return Dense(total.index_add_(0, self.owner, rows))
        # In a trace, owners that depend on no input have values outside of it.
        with nullcontext() if is_traced(self.owner) else internals.outside_of_trace():
            counts = torch.bincount(self.owner, minlength=self.samples)
            order = self.owner.argsort(stable=True)
            owner = self.owner[order]
            first = (counts.cumsum(0) - counts)[owner]
            slot = torch.arange(len(owner), device=owner.device) - first
            longest = int(counts.max()) if len(owner) else 0

        def pad(x: Tensor) -> Tensor:  # (r, t, ...) -> (n, longest * t, ...)
            padded = x.new_zeros(self.samples, longest, *x.shape[1:])
            padded[owner, slot] = x[order]
            return padded.flatten(1, 2)

        grouped: Factor = self.each.mapped(pad)
        return grouped


@dataclass(eq=False)
class Stacked(Wrapper):
    """G_n[e] = F_{n·count+e}: outer products for a stack of matrices, such as experts.

    `each` may be a `ByOwner`.
    """

    count: int  # of matrices

    @property
    def shape(self) -> tuple[int, ...]:
        samples, *shape = self.each.shape
        return (samples // self.count, self.count, *shape)

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.each.materialize(dtype).unflatten(0, (-1, self.count))

    def part(self, samples: slice, rows: slice = ALL) -> Stacked:
        count = len(range(self.count)[rows])
        return Stacked(self._with_stacks(lambda t: t[samples, rows].flatten(0, 1)), count)

    def transposed(self) -> Stacked:
        return Stacked(self.each.transposed(), self.count)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Stacked:
        return Stacked(self.products().mapped(change), self.count)

    def grouped(self, dtype: torch.dtype | None = None) -> Stacked:
        """Groups the rows of each matrix by sample."""
        return Stacked(self.each.grouped(dtype), self.count)

    def products(self) -> OuterProduct:
        """Returns the outer products of n·count samples."""
        each = self.each.grouped()
        assert isinstance(each, OuterProduct)
        return each

    def summed(self) -> OuterProduct:
        """Σ_n G_n, as a factor whose samples are the matrices."""
        return self._with_stacks(lambda t: t.transpose(0, 1).flatten(1, 2))

    def _with_stacks(self, change: Callable[[Tensor], Tensor]) -> OuterProduct:
        """Applies `change` to the tensors of the products, viewed as (n, count, t, d)."""
        found: OuterProduct = self.products().mapped(
            lambda t: change(t.unflatten(0, (-1, self.count)))
        )
        return found


def owned(factor: Factor, owner: Tensor, samples: int) -> Factor:
    """Converts a factor over rows into one over samples; `owner` gives the sample of each row."""
    if not isinstance(factor, Stacked):
        if isinstance(factor, Wrapper) and not isinstance(factor, ByOwner):
            # It arranges or scales the entries of each row; a stack inside has several matrices for each.
            return replace(factor, each=owned(factor.each, owner, samples))
        return ByOwner(factor, owner, samples)
    rows, count = factor.each, factor.count
    if not isinstance(rows, ByOwner):
        each = rows.shape[0]
        rows = ByOwner(rows, torch.arange(each, device=owner.device), each)
    place = owner[rows.owner // count] * count + rows.owner % count
    return Stacked(ByOwner(rows.each, place, samples * count), count)
