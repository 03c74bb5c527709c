"""Computes <G_n, D> with a direction D of the weight's shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce, singledispatch
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import (
    ByOwner,
    Convolution,
    ElementProduct,
    Factor,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    Rearranged,
    RowSum,
    Scaled,
)
from pergrad.reductions.inner import multiplied_and_summed
from pergrad.reductions.tiles import sample_tiles, wide_dtype
from pergrad.runtime import mm

__all__ = ["dots"]

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def dots(factors: Sequence[Factor], direction: Tensor, bound: int) -> Tensor:
    """Σ_f <F_n, direction>, (n,) in float64."""
    direction = direction.to(wide_dtype(factors))
    return reduce(add, (dots_of(factor, direction, bound) for factor in factors))


@singledispatch
def dots_of(factor: Factor, direction: Tensor, bound: int) -> Tensor:
    """<G_n, direction> for one factor."""
    found = torch.zeros(factor.shape[0], dtype=torch.float64, device=direction.device)
    for samples, rows, gradients in sample_tiles([factor], bound):
        part = direction[rows] if direction.dim() else direction
        found[samples] += (
            multiplied_and_summed(gradients, part) if direction.dim() else gradients * part
        )
    return found


@dots_of.register
def _(factor: OuterProduct, direction: Tensor, bound: int) -> Tensor:
    x = factor.input
    pushed = mm(x.flatten(0, 1), direction.T, direction.dtype)  # D x
    return multiplied_and_summed(pushed.view(factor.grad_output.shape), factor.grad_output)


@dots_of.register
def _(factor: RowSum, direction: Tensor, bound: int) -> Tensor:
    return multiplied_and_summed(direction[factor.index], factor.grad_output)


@dots_of.register
def _(factor: PositionSum, direction: Tensor, bound: int) -> Tensor:
    return multiplied_and_summed(factor.grad_output.to(direction.dtype), direction)


@dots_of.register
def _(factor: ElementProduct, direction: Tensor, bound: int) -> Tensor:
    return multiplied_and_summed(factor.grad_output.to(direction.dtype) * direction, factor.input)


@dots_of.register
def _(factor: NormalizedProduct, direction: Tensor, bound: int) -> Tensor:
    return dots_of(factor.written(), direction, bound)


@dots_of.register
def _(factor: Convolution, direction: Tensor, bound: int) -> Tensor:
    x = factor.padded_input().to(direction.dtype).flatten(0, 1)
    convolve = _CONVOLUTIONS[len(factor.stride)]
    pushed = convolve(x, direction, None, factor.stride, 0, factor.dilation, factor.groups)
    for dim, size in enumerate(factor.grad_output.shape[3:], 2):
        pushed = pushed.narrow(dim, 0, size)  # that of a transposed convolution may be longer
    return multiplied_and_summed(pushed.reshape(factor.grad_output.shape), factor.grad_output)


@dots_of.register
def _(factor: Rearranged, direction: Tensor, bound: int) -> Tensor:
    return dots_of(factor.each, factor.restored(direction.unsqueeze(0))[0], bound)


@dots_of.register
def _(factor: Scaled, direction: Tensor, bound: int) -> Tensor:
    return dots_of(factor.each, direction * factor.constant.to(direction.dtype), bound)


@dots_of.register
def _(factor: ByOwner, direction: Tensor, bound: int) -> Tensor:
    each = dots_of(factor.each, direction, bound)
    return each.new_zeros(factor.samples).index_add_(0, factor.owner, each)
