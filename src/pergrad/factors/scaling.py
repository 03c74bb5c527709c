"""Defines `Scaled`, the factor of a weight that was multiplied by a constant before its use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pergrad.factors.base import ALL
from pergrad.factors.products import OuterProduct
from pergrad.factors.rows import Wrapper

__all__ = ["Scaled"]


@dataclass(eq=False)
class Scaled(Wrapper):
    """G_n = F_n ⊙ c, with a constant c that broadcasts to the weight: a mask or a number.

    >>> from pergrad.factors import Dense
    >>> Scaled(Dense(torch.ones(1, 3)), torch.tensor([0.0, 1.0, 2.0])).materialize()
    tensor([[0., 1., 2.]])
    """

    constant: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.each.shape

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        found = self.each.materialize(dtype)
        constant = self.constant.to(found.dtype)
        is_new = isinstance(self.each, OuterProduct)  # nobody else holds it
        return found.mul_(constant) if is_new else found * constant

    def part(self, samples: slice, rows: slice = ALL) -> Scaled:
        constant = self.constant
        if rows != ALL and constant.dim() == len(self.shape) - 1 and constant.shape[0] > 1:
            constant = constant[rows]
        return Scaled(self.each.part(samples, rows), constant)

    def transposed(self) -> Scaled:
        constant = self.constant
        return Scaled(self.each.transposed(), constant.expand(self.shape[1:]).mT)

    def grouped(self, dtype: torch.dtype | None = None) -> Scaled:
        return Scaled(self.each.grouped(dtype), self.constant)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Scaled:
        return Scaled(self.each.mapped(change), self.constant)

    @property
    def scratch(self) -> int:
        copied = 0 if isinstance(self.each, OuterProduct) else prod(self.shape[1:])
        return self.each.scratch + copied
