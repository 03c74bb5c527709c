"""Defines factors that sum products of inputs and output gradients over positions."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pergrad.factors.base import ALL, Factor
from pergrad.factors.choosing import chooser_of
from pergrad.runtime.allocation import large_result
from pergrad.runtime.precision import bmm, in_dtype, promoted, wide, with_aligned_width

__all__ = ["ElementProduct", "NormalizedProduct", "OuterProduct", "PositionSum", "sums_by_groups"]


_SMALL = 2**16  # elements of a result that is never kept memory
_LARGE = 2**20  # elements of one sample's gradient, from which on padding costs little


def _by_product(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_t g ⊗ x, (n, o, i)."""
    o, i = g.shape[2], x.shape[2]
    longer = with_aligned_width(g) if o * i >= _LARGE else g
    if longer is g:
        return bmm(g.mT, x, dtype)
    return bmm(longer.mT, x, dtype)[:, :o]  # a gap between samples, none inside


def _by_transposed_product(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes Σ_t x ⊗ g, (n, i, o), and transposes it by a copy."""
    return bmm(x.mT, g, dtype).mT.contiguous()


GRADIENT_WAYS = {"as it is": _by_product, "transposed": _by_transposed_product}


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
        g, x = self.grad_output, self.input
        dtype = dtype or g.dtype
        if g.shape[1] == 1:  # broadcasting beats a batch of rank-1 GEMMs
            g, x = in_dtype(g, dtype), in_dtype(x, dtype)
            if g.numel() * x.shape[2] < _SMALL:
                return torch.mul(g.mT, x)
            return torch.mul(g.mT, x, out=large_result(self.shape, g))
        way = chooser_of(g).pick("gradient of an outer product", (g.shape[2], x.shape[2]))
        return GRADIENT_WAYS[way](g, x, dtype)

    def part(self, samples: slice, rows: slice = ALL) -> OuterProduct:
        return OuterProduct(self.grad_output[samples, :, rows], self.input[samples])

    def transposed(self) -> OuterProduct:
        return OuterProduct(self.input.to(self.dtype), self.grad_output)


@dataclass(eq=False)
class _OverPositions(Factor):
    """Sums gradients of the weight's shape over positions."""

    grad_output: Tensor  # (n, t, *weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.grad_output.shape[0], *self.grad_output.shape[2:])

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_output.dtype


def _cut(x: Tensor, samples: slice, rows: slice) -> Tensor:
    """Selects samples and entries of the weight's first dimension from (n, t, *weight)."""
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


def sums_by_groups(
    g: Tensor,  # (n, c, t)
    x: Tensor,  # (n, c, t)
    mean: Tensor,  # (n, groups) of neighbouring channels
    inverse: Tensor,  # (n, groups)
) -> tuple[Tensor, Tensor]:  # (n, c) each
    """Σ_t g ⊙ (x - mean) / std and Σ_t g, by torch's backward of a group norm; all arguments have one dtype.

    That backward also sums over the batch, so all samples are passed as channels of a single one.
    """
    channels, positions = g.shape[0] * g.shape[1], g.shape[2]
    unread = g.new_empty(channels)  # γ, which only the input's gradient depends on
    _, of_scale, of_shift = torch.ops.aten.native_group_norm_backward(
        *(t.contiguous().view(1, channels, positions) for t in (g, x)),
        *(t.contiguous().view(1, -1) for t in (mean, inverse)),
        unread,
        1,
        channels,
        positions,
        mean.numel(),
        [False, True, True],
    )
    return of_scale.view(g.shape[:2]), of_shift.view(g.shape[:2])


@dataclass(eq=False)
class NormalizedProduct(_OverPositions):
    """G_n = Σ_t g[n,t] ⊙ (x[n,t] - mean) / std, without writing the normalised x.

    Statistics belong either to each position or to each group of adjacent columns.

    >>> x, of_positions = torch.tensor([[[1.0, 3.0]]]), torch.ones(1, 1, 1)
    >>> NormalizedProduct(torch.ones(1, 1, 2), x, 2 * of_positions, of_positions).materialize()
    tensor([[-1.,  1.]])
    """

    input: Tensor  # (n, t, *weight)
    mean: Tensor  # (n, t, 1) or (n, 1, groups)
    inverse: Tensor  # 1 / std, of the same shape

    @property
    def scratch(self) -> int:
        return 2 * prod(self.grad_output.shape[1:])

    def written(self) -> ElementProduct:
        """Writes the normalised x, in float32 or wider."""
        groups, width = self.mean.shape[2], prod(self.input.shape[2:])
        x = self.input.to(wide(self.input.dtype)).flatten(2).unflatten(2, (groups, width // groups))
        normalized = (x - self.mean.unsqueeze(3)) * self.inverse.unsqueeze(3)
        return ElementProduct(self.grad_output, normalized.reshape(self.input.shape))

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        # With a single position there is nothing to sum, and x - mean is more exact.
        is_of_groups = self.mean.shape[1] == 1 < self.input.shape[1] and self.input.numel() > 0
        way = chooser_of(self.input).pick("sums of a normalised product")
        if not is_of_groups or dtype not in (torch.float32, torch.float64) or way == "written":
            return self.written().materialize(dtype)
        of_channels = (t.to(dtype).flatten(2).mT for t in (self.grad_output, self.input))
        statistics = (t.to(dtype).squeeze(1) for t in (self.mean, self.inverse))
        return sums_by_groups(*of_channels, *statistics)[0].view(self.shape)

    def part(self, samples: slice, rows: slice = ALL) -> NormalizedProduct:
        g, x = (_cut(x, samples, rows) for x in (self.grad_output, self.input))
        mean, inverse = self.mean[samples], self.inverse[samples]
        if rows != ALL and mean.shape[2] > 1:  # a group may be cut in two
            of_group = self.input.shape[2] // mean.shape[2]
            mean, inverse = (t.repeat_interleave(of_group, 2)[..., rows] for t in (mean, inverse))
        return NormalizedProduct(g, x, mean, inverse)
