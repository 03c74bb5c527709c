"""Sums gradients in random directions, at a fraction of the cost of the sums themselves.

Two matrices that differ have other products with a random vector, as in Freivalds' check of matrix products.
Blocks of rows keep the noise small: a direction adds up the rounding of at most `_MOST` entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pergrad.factors import Factor, OuterProduct
from pergrad.runtime import mm

__all__ = ["COUNT", "Directions"]

# An error of size e in an entry shows in all directions as less than e / 3 with a chance of (1/3)^8, 2e-4.
COUNT = 8
_LEAST, _MOST = 64, 128  # rows of a block; with fewer, directions would save little
_LITTLE = 10**6  # multiplications that take as long as ten calls of torch


class _Blocks(NamedTuple):
    dim: int  # of the matrix: 0 for its rows, 1 for its columns
    size: int


class Directions:
    """Random directions of blocks of rows of a matrix, or of columns: (o, i) -> (o / size · COUNT, i).

    >>> directions = Directions(torch.ones(128, COUNT))
    >>> directions.of(torch.ones(256, 3)).shape
    torch.Size([24, 3])
    """

    rows = _MOST

    def __init__(self, drawn: Tensor) -> None:  # (rows, COUNT)
        self._drawn = drawn
        self._cuts: dict[tuple[int, ...], _Blocks | None] = {}
        self._cast: dict[tuple[int, torch.dtype, torch.device, bool], Tensor] = {}

    def pay_for(self, factors: Sequence[Factor]) -> bool:
        """Whether sums of these factors take less time in directions: large products in float32 or wider."""
        return (
            all(_is_large_product(f) for f in factors)
            and self._blocks_or_none(factors[0].shape[1:]) is not None
        )

    def of_factor(self, factor: Factor) -> Factor:
        """Returns the factor of G_n in the directions."""
        assert isinstance(factor, OuterProduct)
        g, x = factor.grad_output, factor.input
        blocks = self._blocks_of(factor.shape[1:])
        if blocks.dim == 0:
            return OuterProduct(self._of_last(g, blocks.size), x)
        return OuterProduct(g, self._of_last(x, blocks.size))

    def of(self, matrix: Tensor) -> Tensor:
        """Returns a sum of gradients in the directions."""
        blocks = self._blocks_of(tuple(matrix.shape))
        if blocks.dim == 1:
            return self._of_last(matrix, blocks.size)
        parts = matrix.reshape(-1, blocks.size, matrix.shape[1])
        drawn = self._for(blocks.size, matrix, is_transposed=True).expand(len(parts), -1, -1)
        return torch.bmm(drawn, parts).flatten(0, 1)

    def least_error(self, error: float, shape: Sequence[int]) -> float:
        """Returns how far off some entry must be, at least, if a direction is off by `error`."""
        return error / (float(self._drawn.abs().max()) * self._blocks_of(tuple(shape)).size)

    def _of_last(self, t: Tensor, size: int) -> Tensor:
        found = mm(t.reshape(-1, size), self._for(size, t), t.dtype)
        return found.view(*t.shape[:-1], -1)

    def _blocks_of(self, shape: Sequence[int]) -> _Blocks:
        found = self._blocks_or_none(tuple(shape))
        assert found is not None, "`pay_for` says whether there are blocks"
        return found

    def _blocks_or_none(self, shape: tuple[int, ...]) -> _Blocks | None:
        if shape not in self._cuts:
            self._cuts[shape] = _blocks(shape)
        return self._cuts[shape]

    def _for(self, size: int, like: Tensor, *, is_transposed: bool = False) -> Tensor:
        key = size, like.dtype, like.device, is_transposed
        if key not in self._cast:
            drawn = self._drawn[:size].T if is_transposed else self._drawn[:size]
            self._cast[key] = drawn.to(like).contiguous()
        return self._cast[key]


def _is_large_product(factor: Factor) -> bool:
    if type(factor) is not OuterProduct or factor.dtype not in (torch.float32, torch.float64):
        return False
    g, x = factor.grad_output, factor.input
    return g.dtype == x.dtype and g.numel() * x.shape[2] > _LITTLE


def _blocks(shape: tuple[int, ...]) -> _Blocks | None:
    """Returns the largest blocks of rows, else of columns, that a matrix can be cut into."""
    for dim, length in enumerate(shape):
        for size in range(min(_MOST, length), _LEAST - 1, -1):
            if length % size == 0:
                return _Blocks(dim, size)
    return None
