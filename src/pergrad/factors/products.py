"""Sums over positions of products of what flows in and what flows back."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pergrad.factors.allocation import large_result
from pergrad.factors.base import ALL, Factor
from pergrad.factors.precision import bmm, promoted, wide

__all__ = ["ElementProduct", "NormalizedProduct", "OuterProduct", "PositionSum"]


def transposed_is_cheaper(o: int, i: int) -> bool:
    """Whether a CPU computes the (i, o) gradient faster, copy included.

    Rows of a result are computed in vectors of 16: a first convolution's 9 or 27 columns leave lanes empty.
    """
    return i % 16 != 0 and o % 16 == 0 and i < min(o, 64)


@dataclass(eq=False)
class OuterProduct(Factor):
    """G_n = Σ_t g[n,t] ⊗ x[n,t], of shape (o, i).

    >>> OuterProduct(torch.ones(2, 5, 3), torch.ones(2, 5, 4)).materialize()[0, 0]
    tensor([5., 5., 5., 5.])
    """

    grad_output: Tensor  # (n, t, o)
    input: Tensor  # (n, t, i)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grad_output.shape[0], self.grad_output.shape[2], self.input.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_output.dtype

    @property
    def positions(self) -> int:
        return self.grad_output.shape[1]

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        g, x, dtype = self.grad_output, self.input, dtype or self.dtype
        if self.positions == 1:  # broadcasting beats a batch of rank-1 GEMMs
            g, x = g.to(dtype), x.to(dtype)
            return torch.mul(g.mT, x, out=large_result(self.shape, g))
        if g.device.type == "cpu" and transposed_is_cheaper(*self.shape[1:]):
            return bmm(x.mT, g, dtype).mT.contiguous()
        return bmm(g.mT, x, dtype)

    def part(self, samples: slice, rows: slice = ALL) -> OuterProduct:
        return OuterProduct(self.grad_output[samples, :, rows], self.input[samples])

    def transposed(self) -> OuterProduct:
        return OuterProduct(self.input.to(self.dtype), self.grad_output)


@dataclass(eq=False)
class _OverPositions(Factor):
    """Of the shape of one position, and summed up over all."""

    grad_output: Tensor  # (n, t, *weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grad_output.shape[0], *self.grad_output.shape[2:])

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_output.dtype


def _cut(x: Tensor, samples: slice, rows: slice) -> Tensor:
    """Of (n, t, *weight), some samples, and some entries of the weight's first dimension."""
    return x[samples] if rows == ALL else x[samples][:, :, rows]


@dataclass(eq=False)
class PositionSum(_OverPositions):
    """G_n = Σ_t g[n,t], of the shape of one position."""

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.grad_output.sum(1, dtype=dtype)

    def part(self, samples: slice, rows: slice = ALL) -> PositionSum:
        return PositionSum(_cut(self.grad_output, samples, rows))


@dataclass(eq=False)
class ElementProduct(_OverPositions):
    """G_n = Σ_t g[n,t] ⊙ x[n,t], of the shape of one position."""

    input: Tensor  # (n, t, *weight)

    @property
    def dtype(self) -> torch.dtype:
        return promoted(self.grad_output.dtype, self.input.dtype)

    @property
    def scratch(self) -> int:
        return prod(self.grad_output.shape[1:])

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        g = self.grad_output if dtype is None else self.grad_output.to(dtype)
        return (g * self.input).sum(1, dtype=dtype)

    def part(self, samples: slice, rows: slice = ALL) -> ElementProduct:
        return ElementProduct(*(_cut(x, samples, rows) for x in (self.grad_output, self.input)))


@dataclass(eq=False)
class NormalizedProduct(_OverPositions):
    """G_n = Σ_t g[n,t] ⊙ (x[n,t] - mean[n,t]) / std[n,t]: the normalised x need not be written.

    >>> x, rows = torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 1)
    >>> NormalizedProduct(torch.ones(1, 1, 2), x, 2 * rows, rows).materialize()
    tensor([[-1.,  1.]])
    """

    input: Tensor  # (n, t, *weight)
    mean: Tensor  # (n, t)
    inverse: Tensor  # (n, t), of 1 / std

    @property
    def scratch(self) -> int:
        return 2 * prod(self.grad_output.shape[1:])

    def written(self) -> ElementProduct:
        """The same with the normalised x, which is not rounded to less than float32."""
        ones = [1] * (self.input.dim() - 2)
        mean, inverse = (t.view(*t.shape, *ones) for t in (self.mean, self.inverse))
        x = self.input.to(wide(self.input.dtype))
        return ElementProduct(self.grad_output, (x - mean) * inverse)

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.written().materialize(dtype or self.dtype)

    def part(self, samples: slice, rows: slice = ALL) -> NormalizedProduct:
        g, x = (_cut(x, samples, rows) for x in (self.grad_output, self.input))
        return NormalizedProduct(g, x, self.mean[samples], self.inverse[samples])
