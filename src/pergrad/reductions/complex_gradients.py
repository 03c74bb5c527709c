"""Computes with the gradients of a complex parameter as with those of its real and imaginary parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pergrad.factors import Dense, Factor, add_up
from pergrad.reductions.gradients import SampleGradients
from pergrad.reductions.weights import SampleWeights
from pergrad.runtime import wide

__all__ = ["ComplexGradients", "gradients_of"]


def gradients_of(
    parameter: Tensor, factors: Sequence[Factor], scale: Tensor | float, bound: int
) -> SampleGradients:
    """Makes the gradients of a parameter from the factors of its uses."""
    if parameter.is_complex():
        return ComplexGradients(factors, scale, bound=bound)
    for f in factors:
        if f.dtype.is_complex:  # a real parameter has the real part
            factors = [_real_part(f) for f in factors]
            break
    return SampleGradients(factors, scale, bound=bound)


def _real_part(factor: Factor) -> Factor:
    if not factor.dtype.is_complex:
        return factor
    return Dense(factor.materialize().real.contiguous())


class ComplexGradients(SampleGradients):
    """G_n of a complex parameter, as real numbers (n, *shape, 2): inner products are Re <a, b>.

    Gradients follow torch's convention: the direction of steepest ascent, ∂L/∂a + i ∂L/∂b for a + ib.
    """

    def __init__(
        self, factors: Sequence[Factor], scale: Tensor | float = 1.0, *, bound: int
    ) -> None:
        found = add_up(factors, None)
        found = found.to(wide(torch.promote_types(found.dtype, torch.complex32)))
        super().__init__([Dense(_parts(found))], scale, bound=bound)

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        found = torch.view_as_complex(super().materialize())
        return found if dtype is None else found.to(dtype)

    @property
    def shares_a_launch_of_sums(self) -> bool:
        return False

    def weighted_sum(self, weights: Tensor | SampleWeights) -> Tensor:
        return torch.view_as_complex(super().weighted_sum(weights).contiguous())

    def total(self) -> Tensor:
        return torch.view_as_complex(super().total().contiguous())

    def sum_of_squares(self) -> Tensor:
        """Σ_n |G_n|², elementwise; real."""
        return super().sum_of_squares().sum(-1)

    def squares_about(self, center: Tensor) -> Tensor:
        """Σ_n |G_n - center|², elementwise; real."""
        return super().squares_about(_parts(center)).sum(-1)

    def dots(self, direction: Tensor) -> Tensor:
        return super().dots(_parts(direction))

    def gram_against(self, stored: Tensor) -> Tensor:
        return super().gram_against(_parts(stored))


def _parts(t: Tensor) -> Tensor:
    """(*shape, 2): real and imaginary part."""
    if not t.is_complex():
        return torch.stack([t, torch.zeros_like(t)], -1)
    return torch.view_as_real(t.resolve_conj())
