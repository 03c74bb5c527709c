"""Computes elementwise moments over the samples: Σ_n G_n² and Σ_n (G_n - mean)²."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pergrad.factors import Factor, OuterProduct, Rearranged, RowSum, Scaled
from pergrad.reductions.norms import way_of_table
from pergrad.reductions.tiles import sample_tiles
from pergrad.runtime import mm, wide

__all__ = ["squares_about", "sum_of_squares"]


def sum_of_squares(factors: Sequence[Factor], scale: Tensor | None, bound: int) -> Tensor:
    """Σ_n (scale[n] G_n)², of the weight's shape, in float32 or wider."""
    (first, *others) = factors
    if isinstance(first, Rearranged) and not others:
        return first.arranged(sum_of_squares([first.each], scale, bound).unsqueeze(0))[0]
    if isinstance(first, OuterProduct) and not others and first.positions == 1:
        dtype = wide(first.dtype)
        g, x = first.grad_output[:, 0].to(dtype), first.input[:, 0].to(dtype)
        g = g if scale is None else g * scale.to(dtype).unsqueeze(1)
        return mm(g.square().T, x.square(), dtype)
    if isinstance(first, Scaled) and not others:
        found = sum_of_squares([first.each], scale, bound)
        return found * first.constant.to(found.dtype).square()
    if isinstance(first, RowSum) and not others and way_of_table(first) != "whole table":
        rows = first.coalesced(wide(first.dtype))
        g = rows.grad_output
        g = g if scale is None else g * scale.to(g.dtype).view(-1, 1, 1)
        total = g.new_zeros(first.shape[1:])
        return total.index_add_(0, rows.index.flatten(), g.square().flatten(0, 1))
    return squares_about(None, factors, scale, bound)


def squares_about(
    center: Tensor | None, factors: Sequence[Factor], scale: Tensor | None, bound: int
) -> Tensor:
    """Σ_n (scale[n] G_n - center)²; unlike a difference of sums, this does not cancel around the mean."""
    (first, *others) = factors
    if isinstance(first, Rearranged) and not others:
        if center is not None:
            center = first.restored(center.unsqueeze(0))[0]
        return first.arranged(squares_about(center, [first.each], scale, bound).unsqueeze(0))[0]
    shape = first.shape[1:]
    total: Tensor | None = None
    for samples, rows, gradients in sample_tiles(factors, bound):
        if scale is not None:
            part = scale[samples].to(gradients.dtype)
            gradients = gradients * part.view(-1, *[1] * len(shape))
        if center is not None:
            gradients = gradients - (center[rows] if shape else center)
        if total is None:
            total = gradients.new_zeros(shape)
        where = total[rows] if shape else total
        where += gradients.square().sum(0)
    assert total is not None
    return total
