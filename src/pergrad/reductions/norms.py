"""Computes |G_n|² of every sample by the cheapest of several exact algorithms.

All multiply in float32 or wider and sum in float64: Gram matrices in bfloat16 are wrong by hundreds of per
cent where positions cancel. Where they cancel to a thousandth, float32 fails too: such samples are computed
again from their gradients.

A float32 gradient with entries beyond 1e19 has an infinite norm, since their squares overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, singledispatch
from math import prod
from operator import add
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pergrad.factors import (
    Convolution,
    Dense,
    ElementProduct,
    Factor,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    Rearranged,
    Routed,
    RowSum,
    Scaled,
    Stacked,
    add_up,
    in_any_order,
)
from pergrad.kernels import all_launchers
from pergrad.reductions.choosing import chooser_of, gram_of_rows_is_cheaper
from pergrad.reductions.inner import inner_products
from pergrad.reductions.tiles import (
    at_once,
    is_one_piece,
    is_small,
    sample_tiles,
    wide_dtype,
)
from pergrad.runtime import bmm, least_trusted, operation, promoted, wide, with_aligned_width

__all__ = [
    "Launch",
    "by_gram",
    "by_rank_one",
    "by_tiles",
    "gradients_behind_norms",
    "is_cancelled",
    "launch_of",
    "norms_of_small",
    "small_gradients",
    "squared_norms",
    "squared_norms_in_one_launch",
    "sums_in_one_launch",
    "way_of_table",
]


def squared_norms(factors: Sequence[Factor], bound: int) -> Tensor:
    """|Σ_f F_n|², (n,) in float64, of joined factors."""
    if len(factors) == 1:
        return squared_norms_of(factors[0], bound)
    kinds = {type(f): f for f in factors}
    if len(factors) == 2 and kinds.keys() == {OuterProduct, RowSum}:
        # For a tied embedding and head, |a + b|² = |a|² + |b|² + 2 <a, b>.
        head, table = kinds[OuterProduct], kinds[RowSum]
        assert isinstance(head, OuterProduct)
        assert isinstance(table, RowSum)
        apart = squared_norms_of(head, bound) + squared_norms_of(table, bound)
        found = apart + 2 * _table_times_product(table, head, bound)
        return _checked(found, apart, [head, table], bound)
    return by_tiles(factors, bound)


@singledispatch
def squared_norms_of(factor: Factor, bound: int) -> Tensor:
    """|G_n|² for one factor."""
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: OuterProduct, bound: int) -> Tensor:
    g, x = factor.grad_output, factor.input
    chooser = chooser_of(g, x)
    if g.shape[1] == 1:
        way = chooser.pick("norms of one position")
    else:
        sizes = g.shape, x.shape, g.dtype, x.dtype
        way = chooser.pick("norms of an outer product", sizes)
    return OUTER_PRODUCT_WAYS[way](factor, bound)


_FEW = 2**14  # elements: copying them to float64 takes less time than another call of torch


@squared_norms_of.register
def _(factor: PositionSum, bound: int) -> Tensor:
    g = factor.grad_output
    if g.shape[1] == 1:  # one position is the gradient
        if g.dim() == 3 and g.numel() <= _FEW:
            return torch.linalg.vector_norm(g, dim=(1, 2), dtype=torch.float64).square()
        return _squared(g[:, 0])
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: RowSum, bound: int) -> Tensor:
    return TABLE_WAYS[way_of_table(factor)](factor, bound)


@squared_norms_of.register
def _(factor: Rearranged, bound: int) -> Tensor:
    return squared_norms_of(factor.each, bound)


@squared_norms_of.register
def _(factor: Scaled, bound: int) -> Tensor:
    if factor.constant.numel() == 1:
        return squared_norms_of(factor.each, bound) * factor.constant.double().square().flatten()
    each = factor.each
    if isinstance(each, OuterProduct) and each.positions == 1:
        g, x = (t[:, 0].double().square() for t in (each.grad_output, each.input))
        squares = factor.constant.double().square().expand(each.shape[1:])
        return (g @ squares).mul_(x).sum(1)  # Σ g² c² x²
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: Routed, bound: int) -> Tensor:
    n, _, i, o = factor.shape
    positions = factor.input.shape[1]
    if gram_of_rows_is_cheaper(positions, i, o):
        return factor.squared_norms(at_once(2 * n * positions * factor.dtype.itemsize, bound))
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: Stacked, bound: int) -> Tensor:
    return squared_norms_of(factor.products(), bound).view(-1, factor.count).sum(1)


@squared_norms_of.register
def _(factor: Convolution, bound: int) -> Tensor:
    chooser = chooser_of(factor.grad_output, factor.input)
    way = chooser.pick("norms of a convolution", _sizes(factor))
    return CONVOLUTION_WAYS[way](factor, bound)


def _sizes(factor: Convolution) -> tuple[Any, ...]:
    """Returns what the cost of a convolution's norms depends on.

    Positions, outputs and columns of each group, spatial dimensions, whether a kernel computes depthwise
    gradients, input channels of each group, and the number of samples and their dtype if there is one tap.
    """
    outputs, columns = factor.kernel[0] // factor.groups, prod(factor.kernel[1:])
    one_tap = (factor.shape[0], factor.dtype) if factor.has_one_tap else None
    of_kernel = factor.has_depthwise_kernel, factor.kernel[1], one_tap
    return factor.positions, outputs, columns, len(factor.stride), *of_kernel


def small_gradients(factors: Sequence[Factor], bound: int) -> Tensor | None:
    """Returns the gradients of all samples if their norms are best computed together with those of others.

    None otherwise. They are written for this purpose: nobody else has the tensor.
    """
    factor: Any = factors[0]
    kind = type(factor)
    if kind not in _SUMMED or len(factors) > 1:
        return None
    g = factor.grad_output
    if g.shape[1] == 1 or chooser_of(g).pick("norms of small gradients") == "one each":
        return None  # one position is the gradient
    if kind is OuterProduct:
        x = factor.input
        (n, t, o), i = g.shape, x.shape[2]
        size, is_wide = n * o * i, g.dtype is x.dtype and wide(g.dtype) is g.dtype
        if not is_wide or size > _FEW or t * size > _MULTIPLIED or size * g.itemsize > bound:
            return None
        return torch.bmm(g.mT, x)
    size, dtype = prod(factor.shape), wide(factor.dtype)
    if size > _FEW or (size + g.numel()) * dtype.itemsize > bound:
        return None
    found: Tensor = factor.materialize(dtype)
    return found


_SUMMED = frozenset([OuterProduct, PositionSum, ElementProduct, RowSum])
_MULTIPLIED = 10**6  # multiplications that take much longer than a call of torch


def norms_of_small(each: list[Tensor]) -> Tensor:
    """|G_n| of gradients of one shape, (n, *shape) each: (len(each), n)."""
    rows = each[0] if len(each) == 1 else torch.cat(each)
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms.view(len(each), -1)


KernelName = Literal["gram_squared_norms", "column_squared_norms"]


class Launch(NamedTuple):
    """Identifies a launch that parameters can share: the kernel, and all that they must agree in."""

    kernel: KernelName
    device: torch.device
    samples: int
    dtypes: tuple[torch.dtype, ...]


def launch_of(factors: Sequence[Factor], bound: int) -> tuple[Launch, tuple[Tensor, ...]] | None:
    """Returns the launch that a parameter can share with others, and the tensors it reads, (n, t, d) each.

    Returns None if a launch of its own is cheaper.
    """
    if len(factors) != 1:
        return None
    factor: Any = factors[0]
    kind = type(factor)  # `isinstance` of an abstract class took half of the time
    if kind is Rearranged:
        factor = in_any_order(factor)
        kind = type(factor)
    if kind is OuterProduct or kind is ElementProduct:
        parts = [factor.grad_output, factor.input]
    elif kind is NormalizedProduct:
        parts = [factor.grad_output, factor.input, factor.mean, factor.inverse]
    elif kind is PositionSum:
        parts = [factor.grad_output]
    elif kind is Dense and is_small(factor):
        parts = [factor.gradients.unsqueeze(1)]  # one position
    else:
        return None
    chooser = chooser_of(*parts)
    if chooser.pick("launches of parameters") == "one each":
        return None
    tensors = (*[t if t.dim() == 3 else _flat_columns(t) for t in parts[:2]], *parts[2:])
    kernel: KernelName = "column_squared_norms"
    if kind is OuterProduct:
        g, x = tensors
        precision = all_launchers().float32_precision() if g.dtype is torch.float32 else None
        sizes = g.shape, x.shape, g.dtype, x.dtype, bound, precision
        if chooser.pick("launch of an outer product", sizes) == "alone":
            return None
        kernel = "gram_squared_norms"
    dtypes = tuple([t.dtype for t in tensors])
    return Launch(kernel, tensors[0].device, tensors[0].shape[0], dtypes), tensors


def squared_norms_in_one_launch(
    launch: Launch, tensors: Sequence[tuple[Tensor, ...]], summed: Sequence[int]
) -> Tensor:
    """|G_n|² of factors with these tensors, then of Σ_t g for each g numbered in `summed`.

    Returns (len(tensors) + len(summed), n) in float64.
    """
    gs, xs, statistics = _in_one_launch(tensors)
    if launch.kernel == "gram_squared_norms":
        assert not summed, "the kernel of inner products computes no exact sums of g"
        return all_launchers().gram_squared_norms(gs, xs)
    return all_launchers().column_squared_norms(gs, xs, statistics, summed)


def sums_in_one_launch(
    tensors: Sequence[tuple[Tensor, ...]], summed: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Returns the gradients, (n, d) each, that a launch for columns computes, and their squared norms."""
    gs, xs, statistics = _in_one_launch(tensors)
    sums, squares = all_launchers().column_sums(gs, xs, statistics, summed)
    widths = [g.shape[2] for g in (*gs, *(gs[k] for k in summed))]
    return list(sums.split(widths, 1)), squares


def _in_one_launch(
    tensors: Sequence[tuple[Tensor, ...]],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Transposes tuples of tensors: all g; all x, if any; all means and then all 1 / std, if any."""
    gs, *others = [list(of_kind) for of_kind in zip(*tensors, strict=True)]
    xs, *statistics = others or [[]]
    return gs, xs, [t for of_kind in statistics for t in of_kind]


def _flat_columns(t: Tensor) -> Tensor:
    """(n, t, *weight) -> (n, t, d)."""
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(2)


# -- ways of an outer product


def by_rank_one(factor: OuterProduct) -> Tensor:
    """|g ⊗ x|² = (|g| |x|)²; in float64, since one may be huge and the other tiny."""
    g, x = factor.grad_output, factor.input
    norms = torch.linalg.vector_norm(g, dim=(1, 2), dtype=torch.float64)
    return (norms * torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64)).square()


def by_gram(factor: OuterProduct, bound: int) -> Tensor:
    """|G_n|² = Σ_ts <g_t, g_s> <x_t, x_s>."""
    n, t = factor.shape[0], factor.positions
    dtype = wide(factor.dtype)
    found = []
    step = at_once(2 * t * t * dtype.itemsize, bound)
    block = t if step > 1 else at_once(2 * t * dtype.itemsize, bound)
    for start in range(0, n, step):
        some = factor.part(slice(start, start + step)) if step < n else factor
        g, x = with_aligned_width(some.grad_output), with_aligned_width(some.input)
        parts = []
        for first in range(0, max(t, 1), max(block, 1)):
            rows = slice(first, first + block)
            a, b = bmm(g[:, rows], g.mT, dtype), bmm(x[:, rows], x.mT, dtype)
            diagonal = a.diagonal(first, 1, 2) * b.diagonal(first, 1, 2)
            parts.append((inner_products(a, b), diagonal.sum(1, dtype=torch.float64)))
        inner, terms = (reduce(add, of_blocks) for of_blocks in zip(*parts, strict=True))
        found.append(_checked(inner, terms, [OuterProduct(g, x)], bound))
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_rank_one_kernel(factor: OuterProduct, bound: int) -> Tensor:
    g, x = factor.grad_output[:, 0], factor.input[:, 0]
    return all_launchers().rank_one_squared_norms(g, x)


def _by_tile_kernel(factor: OuterProduct, bound: int) -> Tensor:
    return all_launchers().tile_squared_norms(factor.grad_output, factor.input)


def _by_small_gradients(factor: OuterProduct, bound: int) -> Tensor:
    """Computes as `by_tiles` in as few calls as possible: they take longer than the arithmetic."""
    g, x = factor.grad_output, factor.input
    if g.shape[0] * g.shape[2] * x.shape[2] * g.itemsize > bound:
        return by_tiles([factor], bound)
    return torch.linalg.vector_norm(torch.bmm(g.mT, x), dim=(1, 2)).double().square()


OUTER_PRODUCT_WAYS: dict[str, Callable[[OuterProduct, int], Tensor]] = {
    "rank one": lambda factor, bound: by_rank_one(factor),
    "small gradients": _by_small_gradients,
    "inner products": by_gram,
    "gradients": lambda factor, bound: by_tiles([factor], bound),
    "rank one kernel": _by_rank_one_kernel,
    "tile kernel": _by_tile_kernel,
}


# -- ways of a table, and of a convolution


def way_of_table(table: RowSum) -> str:
    """Picks how the rows of a table are summed for their squares."""
    sizes = table.shape, table.index.shape[1]
    return chooser_of(table.grad_output).pick("norms of a table", sizes)


def _by_coalesced_rows(table: RowSum, bound: int) -> Tensor:
    return _squared(table.coalesced(wide(table.dtype)).grad_output)


def _by_table_kernel(table: RowSum, bound: int) -> Tensor:
    return all_launchers().table_squared_norms(table.index, table.grad_output)


TABLE_WAYS: dict[str, Callable[[RowSum, int], Tensor]] = {
    "rows added up": _by_coalesced_rows,
    "whole table": lambda table, bound: by_tiles([table], bound),
    "kernel": _by_table_kernel,
}


def _by_gram_of_windows(factor: Convolution, bound: int) -> Tensor:
    """Σ_ts <g_t, g_s> <window_t, window_s>, for as many samples at a time as fit."""
    copied = factor.groups * prod(factor.kernel[1:]) * factor.positions  # of one sample
    step = at_once(copied * factor.input.element_size(), bound)
    found = []
    for start in range(0, factor.shape[0], step):
        some: Convolution = factor.mapped(lambda x, at=start: x[at : at + step])  # type: ignore[misc]
        # The order of the columns does not matter here.
        last = factor.channels_last_is_cheaper
        windows = some.channels_last() if last else some.as_outer_product()
        found.append(by_gram(windows, bound).view(-1, factor.groups).sum(1))
    return torch.cat(found)


def _convolution_by_torch(factor: Convolution, bound: int) -> Tensor:
    """Computes norms by the cheapest way without kernels."""
    chooser = chooser_of(factor.grad_output, by_kernels=False)
    way = chooser.pick("norms of a convolution", _sizes(factor))
    return CONVOLUTION_WAYS[way](factor, bound)


def _by_convolution_tiles(factor: Convolution, bound: int) -> Tensor:
    return all_launchers().convolution_by_tiles(*factor.in_two_dimensions())


def _by_convolution_pairs(factor: Convolution, bound: int) -> Tensor:
    return all_launchers().convolution_by_gram(*factor.in_two_dimensions())


CONVOLUTION_WAYS: dict[str, Callable[[Convolution, int], Tensor]] = {
    "inner products": _by_gram_of_windows,
    "gradients": lambda factor, bound: by_tiles([factor], bound),
    "tile kernel": _by_convolution_tiles,
    "pair kernel": _by_convolution_pairs,
    "torch": _convolution_by_torch,
}


# -- sums that cancelled


def is_cancelled(found: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a sum is so much smaller than its terms that rounding dominates, or overflowed.

    `terms` bounds the norm of the vector of terms; for independent positions the sum is about as large.
    """
    return ~(found >= least_trusted(dtype) * terms)


def _checked(found: Tensor, terms: Tensor, factors: Sequence[Factor], bound: int) -> Tensor:
    """Returns squared norms as found, recomputed from the gradients where too much cancelled.

    Those of a tied embedding and head stay as found where looking at values would synchronise.
    """
    factor = factors[0]
    if len(factors) == 1 and isinstance(factor, OuterProduct):
        chooser = chooser_of(factor.grad_output, factor.input)
        way = chooser.pick("mending of an outer product")
    else:
        way = chooser_of(found).pick("mending")
    return MENDING_WAYS[way](found, terms, factors, bound)


def _computed_again(found: Tensor, terms: Tensor, factors: Sequence[Factor], bound: int) -> Tensor:
    doubtful = is_cancelled(found, terms, wide_dtype(factors)).nonzero().flatten()
    if len(doubtful):
        some = [f.mapped(lambda x: x[doubtful]) for f in factors]
        found[doubtful] = by_tiles(some, bound)
    return found


@operation("mended_norms", lambda found, terms, g, x, bound: torch.empty_like(found))
def _mended_norms(found: Tensor, terms: Tensor, g: Tensor, x: Tensor, bound: int) -> Tensor:
    """Wraps `_computed_again` as an operation, since a trace has no values to look at."""
    return _computed_again(found.clone(), terms, [OuterProduct(g, x)], bound)


def _mended_in_an_operation(found: Tensor, terms: Tensor, factors: Any, bound: int) -> Tensor:
    return _mended_norms(found, terms, factors[0].grad_output, factors[0].input, bound)


def _mended_by_kernel(found: Tensor, terms: Tensor, factors: Any, bound: int) -> Tensor:
    g, x = factors[0].grad_output, factors[0].input
    return all_launchers().mended_squared_norms(found, terms, g, x)


MENDING_WAYS: dict[str, Callable[[Tensor, Tensor, Any, int], Tensor]] = {
    "computed again": _computed_again,
    "in an operation": _mended_in_an_operation,
    "kernel": _mended_by_kernel,
    "left as found": lambda found, *_: found.clamp(min=0),
}


def by_tiles(factors: Sequence[Factor], bound: int) -> Tensor:
    """Σ G_n², of gradients that are materialised a piece at a time."""
    first = factors[0]
    if is_one_piece(factors, bound):
        return _squared(_in_one_piece(factors))
    found: Tensor | None = None
    for samples, _, gradients in sample_tiles(factors, bound):
        squares = _squared(gradients)
        if len(gradients) == first.shape[0] > 1:
            found = squares if found is None else found + squares
            continue
        if found is None:
            found = torch.zeros(first.shape[0], dtype=torch.float64, device=first.device)
        found[samples] += squares
    assert found is not None
    return found


def _in_one_piece(factors: Sequence[Factor]) -> Tensor:
    dtype = wide_dtype(factors)
    return factors[0].materialize(dtype) if len(factors) == 1 else add_up(factors, dtype)


def gradients_behind_norms(factors: Sequence[Factor], bound: int) -> Tensor | None:
    """Returns the gradients of all samples if `squared_norms` materialises them in one piece."""
    is_known = _are_by_tiles(factors) and is_one_piece(factors, bound)
    return _in_one_piece(factors) if is_known else None


def _are_by_tiles(factors: Sequence[Factor]) -> bool:
    """Whether squared norms are computed by materialised gradients, and are not those of a `Dense`."""
    if len(factors) > 1:
        return False
    factor = factors[0]
    if isinstance(factor, OuterProduct):
        g, x = factor.grad_output, factor.input
        sizes = g.shape, x.shape, g.dtype, x.dtype
        return g.shape[1] > 1 and (
            chooser_of(g, x).pick("norms of an outer product", sizes) == "gradients"
        )
    if isinstance(factor, Convolution):
        chooser = chooser_of(factor.grad_output, factor.input)
        return chooser.pick("norms of a convolution", _sizes(factor)) == "gradients"
    if not isinstance(factor, _OVER_POSITIONS) or factor.grad_output.shape[1] == 1:
        return False
    return chooser_of(factor.grad_output).pick("launches of parameters") == "one each"


_OVER_POSITIONS = (PositionSum, ElementProduct, NormalizedProduct)


def _squared(x: Tensor) -> Tensor:
    """Σ x², (n, ...) -> (n,) in float64, without a copy of x in float64."""
    rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    dtype = None if x.dtype.itemsize >= 4 else torch.float32
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double().square()


def _table_times_product(table: RowSum, head: OuterProduct, bound: int) -> Tensor:
    """<Σ_t e_{r_t} ⊗ a_t, Σ_s g_s ⊗ x_s> = Σ_ts g_s[r_t] <a_t, x_s>, (n,)."""
    dtype = wide(promoted(table.dtype, head.dtype))
    t, s = table.index.shape[1], head.positions
    step = at_once(2 * t * s * dtype.itemsize, bound)
    found = []
    for start in range(0, head.shape[0], step):
        rows, products = (
            table.part(slice(start, start + step)),
            head.part(slice(start, start + step)),
        )
        index = rows.index.unsqueeze(1).expand(-1, s, -1)
        picked = products.grad_output.gather(2, index).to(dtype)  # (n, s, t)
        found.append(inner_products(picked, bmm(products.input, rows.grad_output.mT, dtype)))
    return torch.cat(found)
