"""Sums gradients in random directions, at a fraction of the cost of the sums themselves.

Two matrices that differ have other products with a random vector, as in Freivalds' check of matrix products.
Blocks of rows keep the noise small: a direction adds up the rounding of at most `_MOST` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pergrad.factors import Convolution, Factor, OuterProduct
from pergrad.runtime import internals, is_traced, mm

__all__ = ["COUNT", "Directions"]

# An error of size e in an entry shows in all directions as less than e / 3 with a chance of (1/3)^8, 2e-4.
COUNT = 8
_LEAST, _MOST = 64, 128  # rows of a block; with fewer, directions would save little
_WIDE = (torch.float32, torch.float64)
_LITTLE = 10**6  # multiplications that take as long as ten calls of torch


class _Blocks(NamedTuple):
    dim: int  # of the matrix: 0 for its rows, 1 for its columns
    size: int


class Directions:
    """Random directions of blocks of rows of a matrix, or of columns: (o, i) -> (o / size · COUNT, i).

    >>> directions = Directions(torch.ones(128, COUNT))
    >>> directions.of(torch.ones(256, 3)).shape
    torch.Size([16, 3])
    """

    rows = _MOST

    def __init__(self, drawn: Tensor) -> None:  # (rows, COUNT)
        self._drawn = drawn
        self._cuts: dict[tuple[int, ...], _Blocks | None] = {}
        self._cast: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        # The last tensor, in what place and version, and its numbers: a recurrent layer's two weights have
        # the same output gradients.
        self._last: tuple[Tensor, tuple[Any, ...], Tensor] | None = None

    def pay_for(self, factors: Sequence[Factor]) -> bool:
        """Whether sums of these factors take less time in directions: large products in float32 or wider."""
        return (
            all(_is_large_product(f) for f in factors)
            and self._blocks_or_none(factors[0].shape[1:]) is not None
        )

    def of_factor(self, factor: Factor) -> Factor:
        """Returns the factor of G_n in the directions."""
        if isinstance(factor, Convolution):
            g = factor.grad_output
            rows = self._of_rows(g.reshape(g.shape[0] * g.shape[1], g.shape[2], -1), factor.kernel)
            g = rows.view(*g.shape[:2], -1, *g.shape[3:])
            return replace(factor, grad_output=g, kernel=(g.shape[2], *factor.kernel[1:]))
        assert isinstance(factor, OuterProduct)
        g, x = factor.grad_output, factor.input
        blocks = self._blocks_of(factor.shape[1:])
        if blocks.dim == 0:
            return OuterProduct(self._of_last(g, blocks.size), x)
        return OuterProduct(g, self._of_last(x, blocks.size))

    def of(self, total: Tensor) -> Tensor:
        """Returns a sum of gradients in the directions."""
        blocks = self._blocks_of(tuple(total.shape))
        if blocks.dim == 1:
            return self._of_last(total, blocks.size)
        rows = self._of_rows(total.reshape(1, len(total), -1), total.shape)
        return rows.view(-1, *total.shape[1:])

    def _of_rows(self, t: Tensor, shape: Sequence[int]) -> Tensor:
        """(n, o, ...) -> (n · o / size, COUNT, ...)."""
        size = self._blocks_of(shape).size
        parts = t.reshape(-1, size, t.shape[2])
        return torch.bmm(self._for(size, t).expand(len(parts), -1, -1), parts)

    def least_error(self, error: float, shape: Sequence[int]) -> float:
        """Returns how far off some entry must be, at least, if a direction is off by `error`."""
        return error / (float(self._drawn.abs().max()) * self._blocks_of(tuple(shape)).size)

    def forget_last(self) -> None:
        """Frees the tensors that were projected last."""
        self._last = None

    def _of_last(self, t: Tensor, size: int) -> Tensor:
        """(..., i) -> (..., i / size · COUNT)."""
        if is_traced(t):
            return self._product_of_last(t, size)
        key = t.data_ptr(), t.shape, t.stride(), t.dtype, internals.version_of(t), size
        if self._last is None or self._last[1] != key:
            self._last = t, key, self._product_of_last(t, size)
        return self._last[2]

    def _product_of_last(self, t: Tensor, size: int) -> Tensor:
        parts = t.reshape(-1, size)
        # A product with few rows takes a third of the time of one with few columns on a CPU.
        found = mm(self._for(size, t), parts.T, t.dtype)  # (COUNT, parts)
        return found.T.reshape(*t.shape[:-1], -1)

    def _blocks_of(self, shape: Sequence[int]) -> _Blocks:
        found = self._blocks_or_none(tuple(shape))
        assert found is not None, "`pay_for` says whether there are blocks"
        return found

    def _blocks_or_none(self, shape: tuple[int, ...]) -> _Blocks | None:
        if shape not in self._cuts:
            self._cuts[shape] = _blocks(shape)
        return self._cuts[shape]

    def _for(self, size: int, like: Tensor) -> Tensor:  # (COUNT, size)
        key = size, like.dtype, like.device
        if key not in self._cast:
            self._cast[key] = self._drawn[:size].T.to(like).contiguous()
        return self._cast[key]


def _is_large_product(factor: Factor) -> bool:
    if type(factor) is Convolution:
        g, x = factor.grad_output, factor.input
        work = g.numel() * prod(factor.kernel[1:])
        return factor.groups == 1 and g.dtype == x.dtype in _WIDE and work > _LITTLE
    if type(factor) is not OuterProduct or factor.dtype not in _WIDE:
        return False
    g, x = factor.grad_output, factor.input
    return g.dtype == x.dtype and g.numel() * x.shape[2] > _LITTLE


def _blocks(shape: tuple[int, ...]) -> _Blocks | None:
    """Returns the largest blocks of rows, else of columns of a matrix, that a weight can be cut into."""
    for dim, length in enumerate(shape if len(shape) == 2 else shape[:1]):
        for size in range(min(_MOST, length), _LEAST - 1, -1):
            if length % size == 0:
                return _Blocks(dim, size)
    return None
