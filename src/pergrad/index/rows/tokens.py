"""Splits a sample's gradient into its tokens: the terms of each position, which add up to the whole."""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from pergrad.errors import IndexingError
from pergrad.factors import (
    ElementProduct,
    Factor,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    Rearranged,
    RowSum,
    Scaled,
)
from pergrad.index.rows.projecting import Projector
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients

__all__ = ["TokenRows", "by_token"]


class TokenRows(Quantity):
    """Computes a row for each token that `mask`, (n, t), marks, in order: `rows` and `squares`.

    The row of a token is the projection of what its position adds to the sample's gradient. Rows of all
    tokens of a sample add up to the row of the sample. With `norms=False`, `squares` is None.
    """

    def __init__(self, projector: Projector, *, norms: bool = True) -> None:
        self._projector = projector
        self._has_norms = norms
        self.mask = torch.empty(0, 0, dtype=torch.bool)
        self.rows = torch.empty(0)
        self.squares: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        count = int(self.mask.sum())
        self.rows = torch.zeros(
            count, self._projector.width, dtype=batch.dtype, device=batch.device
        )
        if self._has_norms:
            self.squares = torch.zeros(count, dtype=torch.float64, device=batch.device)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        chosen = self.mask.flatten().nonzero()[:, 0]
        parts = [by_token(factor, name, self.mask.shape[1]) for factor in gradients.uses]
        factors = [part.mapped(lambda t: t[chosen]) for part in parts]
        scale = gradients.scale
        if isinstance(scale, Tensor):
            scale = scale.repeat_interleave(self.mask.shape[1])[chosen]
        tokens = SampleGradients(factors, scale, bound=gradients.bound)
        if self.squares is not None:
            self.squares += tokens.squared_norms()
        self._projector.add(self.rows, name, tokens)

    def end(self) -> None: ...


@singledispatch
def by_token(factor: Factor, name: str, tokens: int) -> Factor:
    """Returns the factor with (sample, position) pairs as its samples, n·t of them with one position each."""
    raise IndexingError(
        f"parameter {name!r} has no gradient for each token ({type(factor).__name__}): freeze it with "
        "requires_grad_(False), or build an index of samples"
    )


@by_token.register(OuterProduct)
@by_token.register(PositionSum)
@by_token.register(ElementProduct)
@by_token.register(RowSum)
def _(
    factor: OuterProduct | PositionSum | ElementProduct | RowSum, name: str, tokens: int
) -> Factor:
    _refuse_other_positions(factor.grad_output, name, tokens)
    apart: Factor = factor.mapped(lambda t: t.flatten(0, 1).unsqueeze(1))
    return apart


@by_token.register
def _(factor: NormalizedProduct, name: str, tokens: int) -> Factor:
    return by_token(factor.written(), name, tokens)


@by_token.register
def _(factor: Rearranged, name: str, tokens: int) -> Factor:
    return Rearranged(by_token(factor.each, name, tokens), factor.order, factor.sizes)


@by_token.register
def _(factor: Scaled, name: str, tokens: int) -> Factor:
    return Scaled(by_token(factor.each, name, tokens), factor.constant)


def _refuse_other_positions(grad_output: Tensor, name: str, tokens: int) -> None:
    if grad_output.shape[1] != tokens:
        raise IndexingError(
            f"parameter {name!r} is used at {grad_output.shape[1]} positions of a sample, which has {tokens} "
            "tokens: freeze it with requires_grad_(False), or build an index of samples"
        )
