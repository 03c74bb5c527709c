"""|G_n|² of every sample, by the cheapest of several exact ways.

All of them sum up in float64 what was multiplied in float32 or better: Gram matrices in bfloat16 are
wrong by hundreds of per cent where positions cancel. Where they cancel to a thousandth, those in float32
are no better: such samples are computed again from their gradients.

Entries of a float32 gradient beyond 1e19 have infinite norms: their squares do.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    RowSum,
    Stacked,
    add_up,
)
from pergrad.kernels import kernels_for
from pergrad.reductions.tiles import (
    at_once,
    is_one_piece,
    is_small,
    sample_tiles,
    wide_dtype,
)
from pergrad.runtime import aligned, bmm, is_traced, least_trusted, operation, promoted, wide
from pergrad.runtime.caches import cached

__all__ = [
    "Launch",
    "by_gram",
    "by_rank_one",
    "by_tiles",
    "gram_is_cheaper",
    "is_cancelled",
    "is_little_work",
    "launch_of",
    "squared_norms",
    "squared_norms_in_one_launch",
    "sums_in_one_launch",
]


def squared_norms(factors: Sequence[Factor], bound: int) -> Tensor:
    """|Σ_f F_n|², (n,) in float64, of joined factors."""
    if len(factors) == 1:
        return squared_norms_of(factors[0], bound)
    kinds = {type(f): f for f in factors}
    if len(factors) == 2 and kinds.keys() == {OuterProduct, RowSum}:
        # A tied embedding and head: |a + b|² = |a|² + |b|² + 2 <a, b>.
        head, table = kinds[OuterProduct], kinds[RowSum]
        assert isinstance(head, OuterProduct)
        assert isinstance(table, RowSum)
        apart = squared_norms_of(head, bound) + squared_norms_of(table, bound)
        found = apart + 2 * _table_times_product(table, head, bound)
        return _checked(found, apart, [head, table], bound)
    return by_tiles(factors, bound)


@singledispatch
def squared_norms_of(factor: Factor, bound: int) -> Tensor:
    """|G_n|² of one factor."""
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: OuterProduct, bound: int) -> Tensor:
    g, x = factor.grad_output, factor.input
    kernels = kernels_for(g, x)
    if factor.positions == 1:
        return (
            by_rank_one(factor)
            if kernels is None
            else kernels.rank_one_squared_norms(g[:, 0], x[:, 0])
        )
    if kernels is not None and _tile_kernel_is_cheapest(factor, kernels):
        return kernels.tile_squared_norms(g, x)
    (n, o, i), t = factor.shape, factor.positions
    if gram_is_cheaper(t, o, i) and not is_little_work(n, t, o, i):
        return by_gram(factor, bound)
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: PositionSum, bound: int) -> Tensor:
    g = factor.grad_output
    if g.shape[1] == 1:  # one position is the gradient
        return _squared(g[:, 0])
    return by_tiles([factor], bound)


@squared_norms_of.register
def _(factor: RowSum, bound: int) -> Tensor:
    kernels = kernels_for(factor.grad_output)
    if kernels is not None:
        return kernels.table_squared_norms(factor.index, factor.grad_output)
    return _squared(factor.coalesced(wide(factor.dtype)).grad_output)


@squared_norms_of.register
def _(factor: Stacked, bound: int) -> Tensor:
    return squared_norms_of(factor.products(), bound).view(-1, factor.count).sum(1)


@squared_norms_of.register
def _(factor: Convolution, bound: int) -> Tensor:
    outputs, inputs = factor.kernel[0] // factor.groups, prod(factor.kernel[1:])
    kernels = kernels_for(factor.grad_output, factor.input)
    if kernels is not None and len(factor.stride) <= 2:
        if kernels.convolution_gram_is_cheaper(factor.positions, outputs, inputs):
            return kernels.convolution_by_gram(*factor.in_two_dimensions())
        return kernels.convolution_by_tiles(*factor.in_two_dimensions())
    if not gram_is_cheaper(factor.positions, outputs, inputs):
        return by_tiles([factor], bound)
    copied = factor.groups * inputs * factor.positions  # of one sample
    step = at_once(copied * factor.input.element_size(), bound)
    found = []
    for start in range(0, factor.shape[0], step):
        some: Convolution = factor.mapped(lambda x, at=start: x[at : at + step])  # type: ignore[misc]
        # The order of the columns does not matter here.
        last = factor.channels_last_is_cheaper
        windows = some.channels_last() if last else some.as_outer_product()
        found.append(by_gram(windows, bound).view(-1, factor.groups).sum(1))
    return torch.cat(found)


class Launch(NamedTuple):
    """What can share a launch: the kernel, and all that must be the same for it."""

    kernel: Literal["gram_squared_norms", "column_squared_norms"]
    device: torch.device
    samples: int
    dtypes: tuple[torch.dtype, ...]


def launch_of(factors: Sequence[Factor], bound: int) -> tuple[Launch, tuple[Tensor, ...]] | None:
    """The launch that a parameter can share with others, and what that reads of it, (n, t, d) each.

    None where it is better off by itself.
    """
    if len(factors) != 1:
        return None
    factor: Any = factors[0]
    kind = type(factor)  # `isinstance` of an abstract class took half of the time
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
    kernels = kernels_for(*parts)
    if kernels is None:
        return None
    tensors = (*[t if t.dim() == 3 else _flat_columns(t) for t in parts[:2]], *parts[2:])
    described = [(t.shape, t.dtype) for t in tensors]
    is_outer = kind is OuterProduct
    is_precise = is_outer and factor.dtype is torch.float32
    precision = kernels.float32_precision() if is_precise else None
    device = tensors[0].device
    launch = _launch_for(kernels, device, is_outer, bound, precision, *described)
    return None if launch is None else (launch, tensors)


@cached("launches of norms, by shapes, types and precision", most=1000)
def _launch_for(
    kernels: Any,
    device: torch.device,
    is_outer: bool,
    bound: int,
    precision: str | None,
    *described: tuple[Any, torch.dtype],
) -> Launch | None:
    """The same, which shapes, types and precision decide: asked once for each layer of a kind."""
    shapes, dtypes = zip(*described, strict=True)
    n, t, o = shapes[0]
    if not is_outer:
        return Launch("column_squared_norms", device, n, dtypes)
    is_one_type = dtypes[0] == dtypes[1]
    if is_one_type and _gram_kernel_is_cheapest(kernels, (n, t, o, shapes[1][2]), dtypes[0], bound):
        return Launch("gram_squared_norms", device, n, dtypes)
    return None


def squared_norms_in_one_launch(
    launch: Launch, tensors: Sequence[tuple[Tensor, ...]], summed: Sequence[int]
) -> Tensor:
    """|G_n|² of the factors that are made of these, and then of the sums of the g numbered `summed`.

    (len(tensors) + len(summed), n) in float64.
    """
    kernels, gs, xs, statistics = _in_one_launch(tensors)
    if launch.kernel == "gram_squared_norms":
        assert not summed, "inner products have no sums of g that could be trusted"
        return kernels.gram_squared_norms(gs, xs)
    return kernels.column_squared_norms(gs, xs, statistics, summed)


def sums_in_one_launch(
    tensors: Sequence[tuple[Tensor, ...]], summed: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """Of what a launch for columns reads: the gradients, (n, d) each, and their squared norms."""
    kernels, gs, xs, statistics = _in_one_launch(tensors)
    sums, squares = kernels.column_sums(gs, xs, statistics, summed)
    widths = [g.shape[2] for g in (*gs, *(gs[k] for k in summed))]
    return list(sums.split(widths, 1)), squares


def _in_one_launch(
    tensors: Sequence[tuple[Tensor, ...]],
) -> tuple[Any, list[Tensor], list[Tensor], list[Tensor]]:
    """The kernels, all g, all x or none, and all means and then all 1 / std, or none."""
    gs, *others = [list(of_kind) for of_kind in zip(*tensors, strict=True)]
    kernels = kernels_for(gs[0])
    assert kernels is not None
    xs, *statistics = others or [[]]
    return kernels, gs, xs, [t for of_kind in statistics for t in of_kind]


def _flat_columns(t: Tensor) -> Tensor:
    """(n, t, *weight) -> (n, t, d)."""
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(2)


def _gram_kernel_is_cheapest(
    kernels: Any, sizes: tuple[int, int, int, int], dtype: torch.dtype, bound: int
) -> bool:
    """Against the gradient, and against two whole matrices by the GPU's own library."""
    n, t, o, i = sizes
    if t == 1:
        return False
    is_alone = n * t * (o + i) * dtype.itemsize > bound
    by_kernel: float = kernels.gram_microseconds(*sizes, dtype, is_alone=is_alone)
    if dtype == torch.float32:
        by_gradients = _gradients_microseconds(*sizes)
    else:
        by_gradients = kernels.tile_microseconds(*sizes, dtype)
    return by_kernel <= min(by_gradients, _products_microseconds(*sizes, dtype))


def _tile_kernel_is_cheapest(factor: OuterProduct, kernels: Any) -> bool:
    if factor.dtype == torch.float32:  # the GPU's own products are faster
        return False
    (n, o, i), t, dtype = factor.shape, factor.positions, factor.dtype
    by_kernel: float = kernels.tile_microseconds(n, t, o, i, dtype)
    return factor.input.dtype == dtype and by_kernel <= _products_microseconds(n, t, o, i, dtype)


def _products_microseconds(n: int, t: int, o: int, i: int, dtype: torch.dtype) -> float:
    """What two matrices of inner products cost on an H200: to multiply, write and read them."""
    multiplications = n * t * t * (o + i) / (3.3e8 if dtype.itemsize == 2 else _FLOAT32_RATE)
    return multiplications + n * t * t * 6 * 4 / 4e6 + _MORE_LAUNCHES


def _gradients_microseconds(n: int, t: int, o: int, i: int) -> float:
    """What the gradients themselves cost there in float32: to multiply, write and read them."""
    return n * t * o * i / _FLOAT32_RATE + n * o * i * 2 * 4 / 4e6


_FLOAT32_RATE = 2.0e7  # multiplications a microsecond of an H200's own products in float32


_MORE_LAUNCHES = 20.0  # microseconds: the two products, what is made of them, and their checks


def gram_is_cheaper(t: int, o: int, i: int) -> bool:
    """Whether two (t, t) matrices of inner products cost less than the (o, i) gradient itself."""
    return t * (o + i) < o * i


def is_little_work(n: int, t: int, o: int, i: int) -> bool:
    """Whether the gradients themselves take no longer than the calls that inner products need more."""
    return n * t * o * i < _LITTLE


_LITTLE = 10**6  # multiplications; ten calls of torch


def by_rank_one(factor: OuterProduct) -> Tensor:
    """|g ⊗ x|² = |g|² |x|²; each in float64, since one may be huge where the other is tiny."""
    return _squared(factor.grad_output.double()) * _squared(factor.input.double())


def by_gram(factor: OuterProduct, bound: int) -> Tensor:
    """|G_n|² = Σ_ts <g_t, g_s> <x_t, x_s>."""
    n, t = factor.shape[0], factor.positions
    dtype = wide(factor.dtype)
    found = []
    step = at_once(2 * t * t * dtype.itemsize, bound)
    block = t if step > 1 else at_once(2 * t * dtype.itemsize, bound)
    for start in range(0, n, step):
        some = factor.part(slice(start, start + step)) if step < n else factor
        g, x = aligned(some.grad_output), aligned(some.input)
        parts = []
        for first in range(0, max(t, 1), max(block, 1)):
            rows = slice(first, first + block)
            a, b = bmm(g[:, rows], g.mT, dtype), bmm(x[:, rows], x.mT, dtype)
            diagonal = a.diagonal(first, 1, 2) * b.diagonal(first, 1, 2)
            parts.append((_inner(a, b), diagonal.sum(1, dtype=torch.float64)))
        inner, terms = (reduce(add, of_blocks) for of_blocks in zip(*parts, strict=True))
        found.append(_checked(inner, terms, [OuterProduct(g, x)], bound))
    return found[0] if len(found) == 1 else torch.cat(found)


def is_cancelled(found: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a sum is so much smaller than its terms that their rounding errors show, or overflowed.

    `terms` bounds their length as a vector; of independent positions, the sum is as large.
    """
    return ~(found >= least_trusted(dtype) * terms)


def _checked(found: Tensor, terms: Tensor, factors: Sequence[Factor], bound: int) -> Tensor:
    """Squared norms as found, or from the gradients where too much has cancelled.

    On a GPU and in a compiled step not those of a tied embedding and head: they would have to be waited for.
    """
    factor = factors[0]
    if found.device.type == "cpu" and not is_traced(found):
        return _computed_again(found, terms, factors, bound)
    if len(factors) == 1 and isinstance(factor, OuterProduct):
        g, x = factor.grad_output, factor.input
        if found.device.type == "cpu":
            return _mended_norms(found, terms, g, x, bound)
        kernels = kernels_for(g, x)
        if kernels is not None:
            return kernels.mended_squared_norms(found, terms, g, x)
    return found.clamp(min=0)


def _computed_again(found: Tensor, terms: Tensor, factors: Sequence[Factor], bound: int) -> Tensor:
    doubtful = is_cancelled(found, terms, wide_dtype(factors)).nonzero().flatten()
    if len(doubtful):
        some = [f.mapped(lambda x: x[doubtful]) for f in factors]
        found[doubtful] = by_tiles(some, bound)
    return found


@operation("mended_norms", lambda found, terms, g, x, bound: torch.empty_like(found))
def _mended_norms(found: Tensor, terms: Tensor, g: Tensor, x: Tensor, bound: int) -> Tensor:
    """The same as a function of a compiled step, which cannot look at numbers itself."""
    return _computed_again(found.clone(), terms, [OuterProduct(g, x)], bound)


def by_tiles(factors: Sequence[Factor], bound: int) -> Tensor:
    """Σ of the squares of the gradients, materialised a piece at a time."""
    if is_one_piece(factors, bound):
        return _squared(add_up(factors, wide_dtype(factors)))
    first = factors[0]
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


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b, (n, ...) -> (n,) in float64."""
    a, b = a.flatten(1), b.flatten(1)
    if a.device.type == "cpu":  # three times as fast as to multiply, and then to sum up in float64
        return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1).double()
    return (a * b).sum(1, dtype=torch.float64)


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
        found.append(_inner(picked, bmm(products.input, rows.grad_output.mT, dtype)))
    return torch.cat(found)
