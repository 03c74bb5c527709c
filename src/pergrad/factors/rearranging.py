"""Defines `Rearranged`, the factor of a weight that was used in another shape or order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pergrad.factors.base import ALL, Dense, Factor
from pergrad.factors.rows import Wrapper
from pergrad.runtime.precision import wide

__all__ = ["Rearranged", "in_any_order"]


@dataclass(eq=False)
class Rearranged(Wrapper):
    """G_n = F_n with its dimensions permuted by `order`, or else reshaped to `sizes`.

    >>> each = Dense(torch.arange(12.0).view(2, 3, 2))
    >>> Rearranged(each, order=(1, 0)).shape, Rearranged(each, sizes=(6,)).shape
    ((2, 2, 3), (2, 6))
    """

    order: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        samples, *sizes = self.each.shape
        return (samples, *(self.sizes if self.order is None else [sizes[d] for d in self.order]))

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.arranged(self.each.materialize(dtype))

    def part(self, samples: slice, rows: slice = ALL) -> Factor:
        if rows == ALL:
            return self._of(self.each.part(samples))
        if self._keeps_rows:
            each = self.each.part(samples, rows)
            return Rearranged(each, self.order, (each.shape[1], *self.sizes[1:]))
        return Dense(self.part(samples).materialize(wide(self.dtype))[:, rows])

    def grouped(self, dtype: torch.dtype | None = None) -> Rearranged:
        return self._of(self.each.grouped(dtype))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Rearranged:
        return self._of(self.each.mapped(change))

    @property
    def scratch(self) -> int:
        return self.each.scratch

    def arranged(self, t: Tensor) -> Tensor:
        """Arranges (k, *shape of `each`) like the weight."""
        if self.order is None:
            return t.reshape(len(t), *self.sizes)
        return t.permute(0, *[1 + d for d in self.order])

    def restored(self, t: Tensor) -> Tensor:
        """Arranges (k, *weight) like `each`: the inverse of `arranged`."""
        if self.order is None:
            return t.reshape(len(t), *self.each.shape[1:])
        return t.permute(0, *[1 + self.order.index(d) for d in range(len(self.order))])

    @property
    def _keeps_rows(self) -> bool:
        """Whether the weight's first dimension is also the first of `each`."""
        if self.order is not None:
            return self.order[0] == 0
        return len(self.each.shape) > 1 and self.sizes[:1] == tuple(self.each.shape[1:2])

    def _of(self, each: Factor) -> Rearranged:
        return Rearranged(each, self.order, self.sizes)


def in_any_order(factor: Factor) -> Factor:
    """Returns a factor with the same entries, for reductions that do not depend on their order."""
    while isinstance(factor, Rearranged):
        factor = factor.each
    return factor
