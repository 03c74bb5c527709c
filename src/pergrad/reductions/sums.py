"""Σ_n c_n G_n: one product over samples and positions, never a gradient for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce, singledispatch
from operator import add
from typing import Any

import torch
from torch import Tensor

from pergrad.factors import ByOwner, Convolution, Dense, Factor, OuterProduct, RowSum, Stacked
from pergrad.kernels import kernels_for
from pergrad.reductions.tiles import as_rows, is_small, wide_dtype
from pergrad.runtime import aligned, is_for_compiler, is_large, is_traced, mm, operation, wide

__all__ = ["is_summed_in_company", "weighted_sum", "weighted_sums_in_company"]


def weighted_sum(factors: Sequence[Factor], scale: Tensor | None) -> Tensor:
    """Σ_f Σ_n scale[n] F_n, of the weight's shape, in float32 or wider; without a scale the plain sum.

    A sample whose scale is zero adds nothing, whatever its gradient: also if that is not finite.
    """
    dtype = wide_dtype(factors)
    return reduce(add, (weighted_sum_of(factor, scale, dtype) for factor in factors))


def is_summed_in_company(factors: Sequence[Factor], bound: int) -> bool:
    """Whether a parameter is summed up faster with others: on a GPU, small ones and products of halves."""
    factor = factors[0]
    if len(factors) == 1 and isinstance(factor, Dense):
        return is_small(factor) and kernels_for(factor.gradients) is not None
    if len(factors) > 1 or not isinstance(factor, OuterProduct):
        return False
    g, x = factor.grad_output, factor.input
    if g.dtype != x.dtype or g.dtype.itemsize != 2 or factor.positions < 32:
        return False
    is_small_enough = is_traced(g) or factor.size * g.dtype.itemsize <= bound
    return is_small_enough and kernels_for(g, x) is not None


def weighted_sums_in_company(factors: Sequence[Any], scale: Tensor, bound: int) -> list[Tensor]:
    """Σ_n scale[n] G_n of each, of gradients or of outer products of halves, all of one type.

    For outer products the kernel is slower than the GPU's own product: on an H200 it takes 350 µs for a block
    of GPT-2, where scaling and products take 256. But it is one launch for all parameters, where those are
    four for each. In a compiled step, where launches cost little, it only looks after the products: whether a
    sample that is left out has spoilt them.
    """
    if isinstance(factors[0], Dense):
        return _sums_of_gradients(factors, scale)
    kernels = kernels_for(factors[0].grad_output)
    assert kernels is not None
    if not is_traced(factors[0].grad_output):
        gs, xs = [f.grad_output for f in factors], [f.input for f in factors]
        found: list[Tensor] = kernels.weighted_outer_products(gs, xs, scale)
        return found
    sums: list[Tensor] = []
    waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # their products and factors
    held = 0
    for factor in factors:
        g, x = aligned(factor.grad_output), aligned(factor.input)
        waiting.append((_product(g, x, scale), g, x))
        sums.append(waiting[-1][0][: factor.shape[1], : factor.shape[2]])
        held += g.nbytes + x.nbytes
        if held >= bound or factor is factors[-1]:
            kernels.mend_weighted_outer_products(*map(list, zip(*waiting, strict=True)), scale)
            waiting, held = [], 0
    return sums


def _sums_of_gradients(factors: Sequence[Dense], scale: Tensor) -> list[Tensor]:
    """Side by side, as those of one parameter."""
    rows = [as_rows(f.gradients) for f in factors]
    total = weighted_sum_of(Dense(torch.cat(rows, 1)), scale, wide_dtype(factors))
    parts = total.split([row.shape[1] for row in rows])
    return [part.view(f.shape[1:]) for part, f in zip(parts, factors, strict=True)]


def _product(g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Σ_n scale[n] Σ_t g[n,t] ⊗ x[n,t], spoilt by what is not finite in either."""
    if x.shape[2] < g.shape[2]:
        x = _scaled(x, scale)
    else:
        g = _scaled(g, scale)
    return mm(g.flatten(0, 1).T, x.flatten(0, 1), torch.float32)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """scale[n] x[n, ...], zero where the scale is; rounded to less than float32 on a GPU only.

    There a product in low precision is many times as fast.
    """
    if scale is None:
        return x
    # A compiler makes one kernel of it by itself.
    kernels = None if is_for_compiler(x) else kernels_for(x)
    if kernels is not None:
        return kernels.scaled_samples(x, scale, True)
    scale = scale.view(-1, *[1] * (x.dim() - 1))
    scaled = (x * scale.to(wide(x.dtype))).where(scale != 0, 0)
    return scaled.to(x.dtype) if x.is_cuda else scaled


def _without_dropped(x: Tensor, scale: Tensor | None) -> Tensor:
    """X with zeros for the samples that are left out: their NaNs would outlive a zero factor."""
    if scale is None:
        return x
    kernels = None if is_for_compiler(x) else kernels_for(x)
    if kernels is not None:
        return kernels.scaled_samples(x, scale, False)
    is_kept = scale != 0
    if x.device.type == "cpu" and not is_traced(x) and bool(is_kept.all()):
        return x
    return x.where(is_kept.view(-1, *[1] * (x.dim() - 1)), 0)


@singledispatch
def weighted_sum_of(factor: Factor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Σ_n scale[n] G_n of one factor; the plain way has the gradients of all samples at once."""
    gradients = factor.materialize(dtype)
    if scale is None or gradients.dim() == 1:
        return _scaled(gradients, scale).sum(0)
    return _weighted_rows(gradients.flatten(1), scale).view(gradients.shape[1:])


def _weighted_rows(rows: Tensor, scale: Tensor) -> Tensor:
    kernels = None if is_for_compiler(rows) else kernels_for(rows)
    if kernels is not None:
        found: Tensor = kernels.weighted_rows(rows, scale)
        return found
    if not is_traced(rows):
        return _product_of_rows(rows, scale)
    # A compiler makes one pass of it; but on a CPU it takes twice the time of a product where they are large.
    if rows.device.type == "cpu" and is_large(rows.shape, rows):
        return _large_product_of_rows(rows, scale)
    return _scaled(rows, scale).sum(0)


def _product_of_rows(rows: Tensor, scale: Tensor) -> Tensor:
    return scale.to(rows.dtype) @ _without_dropped(rows, scale)


# In a compiled step as it is: a trace cannot look whether a sample is left out.
_large_product_of_rows = operation(
    "product_of_rows", lambda rows, scale: rows.new_empty(rows.shape[1])
)(_product_of_rows)


@weighted_sum_of.register
def _(factor: OuterProduct, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    g, x = factor.grad_output, factor.input
    if x.shape[2] < g.shape[2]:  # either can take the scale
        g, x = _without_dropped(g, scale), _scaled(x, scale)
    else:
        g, x = _scaled(g, scale), _without_dropped(x, scale)
    total = mm(aligned(g).flatten(0, 1).T, aligned(x).flatten(0, 1), dtype)
    return total[: factor.shape[1], : factor.shape[2]]


@weighted_sum_of.register
def _(factor: RowSum, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    g = _scaled(factor.grad_output, scale).to(dtype).flatten(0, 1)
    return g.new_zeros(factor.shape[1:]).index_add_(0, factor.index.flatten(), g)


@weighted_sum_of.register
def _(factor: Convolution, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    g, x = _scaled(factor.grad_output, scale), _without_dropped(factor.input, scale)
    # A GPU sums up in float32 whatever it is given, and rounds once.
    of_halves = g.dtype if g.is_cuda and g.dtype == x.dtype else dtype
    return replace(factor, grad_output=g, input=x).summed(of_halves).to(dtype)


@weighted_sum_of.register
def _(factor: ByOwner, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weighted_sum_of(factor.each, None if scale is None else scale[factor.owner], dtype)


@weighted_sum_of.register
def _(factor: Stacked, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    each = factor.products()
    of_each = None if scale is None else scale.repeat_interleave(factor.count)
    g, x = _scaled(each.grad_output, of_each), _without_dropped(each.input, of_each)
    total = Stacked(OuterProduct(g, x), factor.count).summed().materialize(dtype)
    return total[:, : factor.shape[2], : factor.shape[3]]
