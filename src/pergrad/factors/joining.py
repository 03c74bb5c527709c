"""Joins the factors of all uses of one weight into few."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from pergrad.factors.base import Dense, Factor
from pergrad.factors.convolution import Convolution
from pergrad.factors.products import OuterProduct
from pergrad.factors.rearranging import Rearranged
from pergrad.factors.rows import RowSum
from pergrad.runtime.precision import promoted, wide

__all__ = ["add_up", "joined"]


def joined(factors: Sequence[Factor]) -> list[Factor]:
    """Joins factors into at most one of each kind, and one convolution of each geometry.

    Sums are taken in float32 or wider, so that joining rounds nothing to a lower precision.
    """
    if len(factors) == 1 and factors[0].is_by_sample:
        return list(factors)
    factors = [f if f.is_by_sample else f.grouped(wide(f.dtype)) for f in factors]
    groups: dict[tuple[object, ...], list[Factor]] = {}
    for factor in factors:
        groups.setdefault(_kind(factor), []).append(factor)
    return [_joined(group) for group in groups.values()]


def _kind(factor: Factor) -> tuple[object, ...]:
    """Returns a key that is equal for factors that can be concatenated along their positions."""
    if isinstance(factor, Convolution):
        space = factor.input.shape[3:]
        return (*factor.geometry, space, factor.grad_output.shape[3:])
    if isinstance(factor, Rearranged):
        return (factor.order, factor.sizes, factor.each.shape, *_kind(factor.each))
    return (type(factor) if isinstance(factor, OuterProduct | RowSum) else Dense,)


def _joined(group: Sequence[Factor]) -> Factor:
    first = group[0]
    if len(group) == 1:
        return first
    if isinstance(first, Rearranged):
        each = [f.each for f in group if isinstance(f, Rearranged)]
        return Rearranged(_joined(each), first.order, first.sizes)
    if isinstance(first, OuterProduct | RowSum | Convolution):
        others = [[*f._tensors().values()] for f in group]
        tensors = iter([_side_by_side(parts) for parts in zip(*others, strict=True)])
        same_kind: Factor = first.mapped(lambda _: next(tensors))
        return same_kind
    return Dense(_sum(group, wide(_promoted([f.dtype for f in group]))))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """(n, t, ...) of several uses -> (n, Σt, ...), in the widest of their types."""
    dtype = _promoted([t.dtype for t in parts])
    return torch.cat([t.to(dtype) for t in parts], 1)


def add_up(factors: Sequence[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """Σ over the uses of one weight, (n, *weight.shape)."""
    if len(factors) == 1:
        return factors[0].materialize(dtype)
    return _sum(joined(factors), dtype or _promoted([f.dtype for f in factors]))


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return reduce(promoted, dtypes)


def _sum(factors: Sequence[Factor], dtype: torch.dtype) -> Tensor:
    total = factors[0].materialize(dtype)
    for factor in factors[1:]:
        total = total + factor.materialize(dtype)
    return total
