"""Computes Σ_n c_n G_n by one product over samples and positions, without per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce, singledispatch
from operator import add
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.factors import (
    ByOwner,
    Convolution,
    Dense,
    Factor,
    OuterProduct,
    PositionSum,
    Rearranged,
    Routed,
    RowSum,
    Scaled,
    Stacked,
    sums_by_row,
)
from pergrad.kernels import all_launchers
from pergrad.reductions.choosing import chooser_of
from pergrad.reductions.tiles import as_rows, is_small, wide_dtype
from pergrad.reductions.weights import SampleWeights
from pergrad.runtime import is_large, mm, operation, wide, with_aligned_width

__all__ = ["shares_a_launch_of_sums", "weighted_sum", "weighted_sums_in_one_launch"]

Scale: TypeAlias = Tensor | SampleWeights  # (n,)


def weighted_sum(factors: Sequence[Factor], scale: Scale | None) -> Tensor:
    """Σ_f Σ_n scale[n] F_n, of the weight's shape, in float32 or wider; None is a scale of 1.

    A sample whose scale is zero adds nothing, even if its gradient is not finite.
    """
    dtype = wide_dtype(factors)
    weights = None if scale is None else SampleWeights.of(scale)
    return reduce(add, [weighted_sum_of(factor, weights, dtype) for factor in factors])


def shares_a_launch_of_sums(factors: Sequence[Factor], bound: int) -> bool:
    """Whether to sum a parameter in one launch with others: on a GPU, if small or in half precision."""
    factor = factors[0]
    if len(factors) == 1 and isinstance(factor, Dense):
        way = chooser_of(factor.gradients).pick("sums of small gradients")
        return way == "together" and is_small(factor)
    if len(factors) > 1 or not isinstance(factor, OuterProduct):
        return False
    g, x = factor.grad_output, factor.input
    sizes = factor.positions, factor.size, g.dtype, x.dtype, bound
    return chooser_of(g, x).pick("sums of outer products", sizes) == "together"


def weighted_sums_in_one_launch(factors: Sequence[Any], scale: Tensor, bound: int) -> list[Tensor]:
    """Σ_n scale[n] G_n of each factor; all are gradients, or outer products, of one dtype."""
    if isinstance(factors[0], Dense):
        return _sums_of_gradients(factors, scale)
    way = chooser_of(factors[0].grad_output).pick("joint sums of outer products")
    return JOINT_SUM_WAYS[way](factors, scale, bound)


def _by_one_kernel(factors: Sequence[OuterProduct], scale: Tensor, bound: int) -> list[Tensor]:
    """Sums all parameters in one launch.

    The kernel is slower than cuBLAS: on an H200 it takes 350 µs for a block of GPT-2, scaling and products
    256 µs. But these are four launches for each parameter.
    """
    gs, xs = [f.grad_output for f in factors], [f.input for f in factors]
    found: list[Tensor] = all_launchers().weighted_outer_products(gs, xs, scale)
    return found


def _by_products(factors: Sequence[OuterProduct], scale: Tensor, bound: int) -> list[Tensor]:
    """Multiplies by cuBLAS; one kernel corrects the sums that dropped samples made non-finite."""
    sums: list[Tensor] = []
    pending: list[tuple[Tensor, Tensor, Tensor]] = []  # products and factors to check
    held = 0
    for factor in factors:
        g, x = with_aligned_width(factor.grad_output), with_aligned_width(factor.input)
        pending.append((_product(g, x, scale), g, x))
        sums.append(pending[-1][0][: factor.shape[1], : factor.shape[2]])
        held += g.nbytes + x.nbytes
        if held >= bound or factor is factors[-1]:
            read = map(list, zip(*pending, strict=True))
            all_launchers().mend_weighted_outer_products(*read, scale)
            pending, held = [], 0
    return sums


JOINT_SUM_WAYS: dict[str, Callable[[Sequence[OuterProduct], Tensor, int], list[Tensor]]] = {
    "kernel": _by_one_kernel,
    "products, mended": _by_products,
}


def _sums_of_gradients(factors: Sequence[Dense], scale: Tensor) -> list[Tensor]:
    """Σ_n scale[n] G_n of all factors, concatenated as if they were one parameter."""
    rows = [as_rows(f.gradients) for f in factors]
    total = weighted_sum([Dense(torch.cat(rows, 1))], scale)
    parts = total.split([row.shape[1] for row in rows])
    return [part.view(f.shape[1:]) for part, f in zip(parts, factors, strict=True)]


def _product(g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Σ_n scale[n] Σ_t g[n,t] ⊗ x[n,t], where 0 · inf is NaN."""
    weights = SampleWeights(scale)
    if x.shape[2] < g.shape[2]:
        x = _scaled(x, weights)
    else:
        g = _scaled(g, weights)
    return mm(g.flatten(0, 1).T, x.flatten(0, 1), torch.float32)


def _scaled(x: Tensor, scale: SampleWeights | None) -> Tensor:
    """scale[n] x[n, ...], zero where the scale is zero; only a GPU rounds it to less than float32."""
    if scale is None:
        return x
    return SCALING_WAYS[chooser_of(x).pick("scaled samples")](x, scale)


def _scaled_in_torch(x: Tensor, scale: Scale) -> Tensor:
    weights = SampleWeights.of(scale)
    return (x * weights.over(x, wide(x.dtype))).where(weights.over(x) != 0, 0)


def _scaled_unless_dropped(x: Tensor, scale: Scale) -> Tensor:
    """Scales in one pass; a second one zeroes dropped samples, if there are any."""
    weights = SampleWeights.of(scale)
    return _scaled_in_torch(x, weights) if weights.drops_any else x * weights.over(x, wide(x.dtype))


def _scaled_by_kernel(x: Tensor, scale: Scale) -> Tensor:
    return all_launchers().scaled_samples(x, SampleWeights.of(scale).values, True)


SCALING_WAYS: dict[str, Callable[[Tensor, Scale], Tensor]] = {
    "in torch": _scaled_in_torch,
    "in torch, dropped ones looked for": _scaled_unless_dropped,
    "in torch, rounded": lambda x, scale: _scaled_in_torch(x, scale).to(x.dtype),
    "kernel": _scaled_by_kernel,
}


def _without_dropped(x: Tensor, scale: SampleWeights | None) -> Tensor:
    """Zeroes the samples of scale zero, since 0 · NaN is NaN."""
    if scale is None:
        return x
    return DROPPING_WAYS[chooser_of(x).pick("dropped samples")](x, scale)


def _zeroed_where_dropped(x: Tensor, scale: Scale) -> Tensor:
    return x.where(SampleWeights.of(scale).over(x) != 0, 0)


def _zeroed_if_any_is_dropped(x: Tensor, scale: Scale) -> Tensor:
    return _zeroed_where_dropped(x, scale) if SampleWeights.of(scale).drops_any else x


def _zeroed_by_kernel(x: Tensor, scale: Scale) -> Tensor:
    return all_launchers().scaled_samples(x, SampleWeights.of(scale).values, False)


DROPPING_WAYS: dict[str, Callable[[Tensor, Scale], Tensor]] = {
    "looked for": _zeroed_if_any_is_dropped,
    "zeroed": _zeroed_where_dropped,
    "kernel": _zeroed_by_kernel,
}


@singledispatch
def weighted_sum_of(factor: Factor, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    """Σ_n scale[n] G_n for one factor; this default materialises the gradients of all samples."""
    return _sum_of_gradients(factor.materialize(dtype), scale)


def _sum_of_gradients(gradients: Tensor, scale: SampleWeights | None) -> Tensor:
    if scale is None or gradients.dim() == 1:
        return _scaled(gradients, scale).sum(0)
    return _weighted_rows(gradients.flatten(1), scale).view(gradients.shape[1:])


def _weighted_rows(rows: Tensor, scale: SampleWeights) -> Tensor:
    """Σ_n scale[n] rows[n]."""
    return WEIGHTED_ROWS_WAYS[chooser_of(rows).pick("weighted rows")](rows, scale)


def _product_of_rows(rows: Tensor, scale: Scale) -> Tensor:
    weights = SampleWeights.of(scale)
    return weights.to(rows.dtype) @ _without_dropped(rows, weights)


# A compiled step calls this as it is: a trace cannot check whether a sample is dropped.
@operation("product_of_rows", lambda rows, scale: rows.new_empty(rows.shape[1]))
def _large_product_of_rows(rows: Tensor, scale: Tensor) -> Tensor:
    return _product_of_rows(rows, scale)


def _scaled_and_summed(rows: Tensor, scale: Scale) -> Tensor:
    return _scaled(rows, SampleWeights.of(scale)).sum(0)


def _scaled_and_summed_unless_large(rows: Tensor, scale: Scale) -> Tensor:
    if is_large(rows.shape, rows):
        return _large_product_of_rows(rows, SampleWeights.of(scale).values)
    return _scaled_and_summed(rows, scale)


def _rows_by_kernel(rows: Tensor, scale: Scale) -> Tensor:
    return all_launchers().weighted_rows(rows, SampleWeights.of(scale).values)


WEIGHTED_ROWS_WAYS: dict[str, Callable[[Tensor, Scale], Tensor]] = {
    "one product": _product_of_rows,
    "scaled and summed": _scaled_and_summed,
    "scaled and summed unless large": _scaled_and_summed_unless_large,
    "kernel": _rows_by_kernel,
}


@weighted_sum_of.register
def _(factor: OuterProduct, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    g, x = factor.grad_output, factor.input
    if x.shape[2] < g.shape[2]:  # either can take the scale
        g, x = _without_dropped(g, scale), _scaled(x, scale)
    else:
        g, x = _scaled(g, scale), _without_dropped(x, scale)
    longer, wider = with_aligned_width(g), with_aligned_width(x)
    total = mm(longer.flatten(0, 1).T, wider.flatten(0, 1), dtype)
    # A kernel that scales pads rows too.
    return total if total.shape == factor.shape[1:] else total[: factor.shape[1], : factor.shape[2]]


@weighted_sum_of.register
def _(factor: PositionSum, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    g = factor.grad_output
    one = g.shape[1] == 1 and g.dtype == dtype  # one position is the gradient
    return _sum_of_gradients(g[:, 0] if one else factor.materialize(dtype), scale)


@weighted_sum_of.register
def _(factor: RowSum, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    g = _scaled(factor.grad_output, scale).flatten(0, 1)
    return sums_by_row(factor.index.flatten(), g.unsqueeze(0), factor.rows, dtype)[0]


@weighted_sum_of.register
def _(factor: Convolution, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    g, x = _scaled(factor.grad_output, scale), _without_dropped(factor.input, scale)
    way = chooser_of(g).pick("sum of a convolution", (g.dtype, x.dtype))
    summed_in = g.dtype if way == "halves" else dtype
    return replace(factor, grad_output=g, input=x).summed(summed_in).to(dtype)


@weighted_sum_of.register
def _(factor: ByOwner, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    of_rows = None if scale is None else SampleWeights(scale.values[factor.owner])
    return weighted_sum_of(factor.each, of_rows, dtype)


@weighted_sum_of.register
def _(factor: Routed, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    return factor.summed(None if scale is None else scale.values, dtype)


@weighted_sum_of.register
def _(factor: Rearranged, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    return factor.arranged(weighted_sum_of(factor.each, scale, dtype).unsqueeze(0))[0]


@weighted_sum_of.register
def _(factor: Scaled, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    return weighted_sum_of(factor.each, scale, dtype) * factor.constant.to(dtype)


@weighted_sum_of.register
def _(factor: Stacked, scale: SampleWeights | None, dtype: torch.dtype) -> Tensor:
    each = factor.products()
    of_each = None
    if scale is not None:
        of_each = SampleWeights(scale.values.repeat_interleave(factor.count))
    g, x = _scaled(each.grad_output, of_each), _without_dropped(each.input, of_each)
    total = Stacked(OuterProduct(g, x), factor.count).summed().materialize(dtype)
    return total[:, : factor.shape[2], : factor.shape[3]]
