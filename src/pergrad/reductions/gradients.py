"""Defines `SampleGradients`, the per-sample gradients of one parameter as quantities see them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from pergrad.factors import (
    Convolution,
    Dense,
    Factor,
    OuterProduct,
    PositionSum,
    Rearranged,
    add_up,
    joined,
)
from pergrad.reductions.choosing import chooser_for
from pergrad.reductions.directions import Directions
from pergrad.reductions.dots import dots
from pergrad.reductions.gram import gram, gram_against
from pergrad.reductions.moments import squares_about, sum_of_squares
from pergrad.reductions.norms import (
    Launch,
    gradients_behind_norms,
    launch_of,
    small_gradients,
    squared_norms,
)
from pergrad.reductions.sketches import (
    CountSketch,
    TwoSidedSketch,
    count_sketch,
    two_sided_sketch,
)
from pergrad.reductions.sums import shares_a_launch_of_sums, weighted_sum
from pergrad.reductions.weights import SampleWeights
from pergrad.runtime import empty, machine_on, wide

__all__ = ["SampleGradients", "scaled_squares"]


class SampleGradients:
    """G_n of one parameter: a sum of factors times a scale for each sample.

    A result that several quantities ask for is computed once. Only `materialize` holds the gradients of all
    samples. Other methods use at most `bound` bytes beside their result, or the bytes of one row, or of the
    windows of one sample's convolution, if that is more.
    """

    _squared_norms: Tensor | None = None
    _total: Tensor | None = None

    def __init__(
        self, factors: Sequence[Factor], scale: Tensor | float = 1.0, *, bound: int
    ) -> None:
        self._factors = list(factors)
        self._is_joined = len(factors) == 1 and factors[0].is_by_sample
        self._scale = scale
        self.bound = bound
        self.dtype = factors[0].dtype  # the coarsest dtype that the gradients are computed from
        for factor in factors[1:]:
            if torch.finfo(factor.dtype).eps > torch.finfo(self.dtype).eps:
                self.dtype = factor.dtype

    @property
    def count(self) -> int:
        """Returns the number of samples."""
        return self._factors[0].shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the parameter."""
        return self._factors[0].shape[1:]

    @property
    def kinds(self) -> list[str]:
        """Returns the kinds of the factors, before they are joined."""
        return [type(f).__name__ for f in self._factors]

    @property
    def uses(self) -> list[Factor]:
        """Returns a factor for each use of the parameter, without the scale; fewer if they are joined."""
        return list(self._factors)

    @property
    def factors(self) -> list[Factor]:
        """Returns the joined factors of all uses, without the scale."""
        if not self._is_joined:
            self._factors, self._is_joined = joined(self._factors), True
        return self._factors

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns G_n, (n, *shape).

        Keeps them for later reductions, unless they are in low precision, which would make those less exact.
        """
        gradients = add_up(self._factors, dtype)
        if isinstance(self._scale, Tensor):  # multiplied in the wider dtype, to round once
            scale = self._scales(gradients, torch.promote_types(self._scale.dtype, gradients.dtype))
            gradients = torch.mul(gradients, scale, out=empty(gradients.shape, gradients))
        elif self._scale != 1:
            gradients = torch.mul(gradients, self._scale, out=empty(gradients.shape, gradients))
        if wide(gradients.dtype) == gradients.dtype:
            self._factors, self._is_joined, self._scale = [Dense(gradients)], True, 1.0
        return gradients

    def compact(self, *, at_any_size: bool = False) -> None:
        """Replaces factors by gradients that take less memory, or little more.

        With `at_any_size`, also where norms and sums of gradients are faster than those of factors.
        """
        self._factors = [
            Dense(f.materialize(wide(f.dtype)))
            if _is_worth_keeping_dense(f) or (at_any_size and _is_faster_dense(f))
            else f
            for f in self.factors
        ]

    def settle(self, factor: Factor, gradients: Tensor) -> None:
        """Replaces the factor by its gradients, (n, d), unless it was replaced already."""
        if self._factors[0] is factor:
            self._factors = [_settled(factor, gradients)]

    @property
    def launch(self) -> tuple[Launch, tuple[Tensor, ...]] | None:
        """Returns the shared launch for the squared norms and the tensors it reads, or None."""
        if self._squared_norms is not None:
            return None
        return launch_of(self.factors, self.bound)

    @property
    def small_or_launch(self) -> Tensor | tuple[Launch, tuple[Tensor, ...]] | None:
        """Returns G_n without the scale if norms of several are best computed together; else `launch`."""
        if self._squared_norms is not None:
            return None
        factors = self.factors
        small = small_gradients(factors, self.bound)
        return launch_of(factors, self.bound) if small is None else small

    def squared_norms(self) -> Tensor:
        """|G_n|², (n,) in float64."""
        if self._squared_norms is None:
            found = squared_norms(self.factors, self.bound)
            self._squared_norms = scaled_squares(found, self._scale)
        return self._squared_norms

    @property
    def scale(self) -> Tensor | float:
        """Returns the scale of the current factors: (n,), or one number for all samples."""
        return self._scale

    def weighted_sum(self, weights: Tensor | SampleWeights) -> Tensor:
        """Σ_n weights[n] G_n; a sample of weight zero adds nothing, not even a NaN."""
        return weighted_sum(self._factors, self.scaled_weights(weights))

    def weighted_sum_and_norms(
        self, weights: Tensor | SampleWeights, directions: Directions | None = None
    ) -> Tensor:
        """Σ_n weights[n] G_n, before `squared_norms`: gradients that both need are computed once.

        With `directions`, which must pay for the factors, the sum is taken in these.
        """
        if directions is not None:
            some = [directions.of_factor(f) for f in self.factors]
            return weighted_sum(some, self.scaled_weights(weights))
        gradients: Tensor | None = None
        if self._squared_norms is None:
            gradients = gradients_behind_norms(self.factors, self.bound)
        if gradients is None:
            return self.weighted_sum(weights)
        dense = [Dense(gradients)]
        self._squared_norms = scaled_squares(squared_norms(dense, self.bound), self._scale)
        return weighted_sum(dense, self.scaled_weights(weights))

    def scaled_weights(self, weights: Tensor | SampleWeights) -> SampleWeights:
        """Multiplies weights by the scale, which the factors do not include."""
        given = SampleWeights.of(weights.double() if isinstance(weights, Tensor) else weights)
        if self._is_unscaled:
            return given
        return SampleWeights(given.values * self._scale_of(given.values))

    @property
    def shares_a_launch_of_sums(self) -> bool:
        """Whether the weighted sum is best computed in one launch with other parameters."""
        return shares_a_launch_of_sums(self.factors, self.bound)

    def total(self) -> Tensor:
        """Σ_n G_n."""
        if self._total is None:
            scale = self._scale
            if isinstance(scale, Tensor):
                self._total = weighted_sum(self._factors, scale.to(self._device))
            else:
                self._total = weighted_sum(self._factors, None) * scale
        return self._total

    def sum_of_squares(self) -> Tensor:
        """Σ_n G_n², elementwise."""
        return sum_of_squares(self.factors, self._scale_or_none(), self.bound)

    def squares_about(self, center: Tensor) -> Tensor:
        """Σ_n (G_n - center)², elementwise."""
        return squares_about(center, self.factors, self._scale_or_none(), self.bound)

    def dots(self, direction: Tensor) -> Tensor:
        """<G_n, direction>, (n,) in float64."""
        return self._scaled(dots(self._factors, direction, self.bound))

    def gram(self) -> Tensor:
        """<G_n, G_m>, (n, n) in float64."""
        return self._scaled(self._scaled(gram(self.factors, self.bound)).T)

    def gram_against(self, stored: Tensor) -> Tensor:
        """<G_n, stored[m]>, (n, m) in float64."""
        return self._scaled(gram_against(self.factors, stored, self.bound))

    def sketch(self, sketch: CountSketch | TwoSidedSketch) -> Tensor:
        """Computes a random projection of G_n, (n, k)."""
        if isinstance(sketch, CountSketch):
            found = count_sketch(self._factors, sketch, self.bound)
        else:
            found = two_sided_sketch(self._factors, sketch, self.bound)
        return self._scaled(found)

    # -- the scale, in the shapes that reductions need

    @property
    def _device(self) -> torch.device:
        return self._factors[0].device

    @property
    def _is_unscaled(self) -> bool:
        return not isinstance(self._scale, Tensor) and self._scale == 1

    def _scaled(self, found: Tensor) -> Tensor:
        """Multiplies (n, ...) by the scale."""
        return found if self._is_unscaled else found * self._scales(found)

    def _scale_or_none(self) -> Tensor | None:
        if isinstance(self._scale, Tensor):
            return self._scale.to(self._device)
        if self._scale == 1:
            return None
        return torch.full((self.count,), self._scale, dtype=torch.float64, device=self._device)

    def _scale_of(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the scale as (n,), or as a tensor without dimensions."""
        return torch.as_tensor(self._scale, dtype=dtype or like.dtype, device=like.device)

    def _scales(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the scale in a shape that broadcasts over (n, ...)."""
        scale = self._scale_of(like, dtype)
        return scale.view(-1, *[1] * (like.dim() - 1)) if scale.dim() else scale


def scaled_squares(squares: Tensor, scale: Tensor | float) -> Tensor:
    """Multiplies squared norms of factors, (..., n), by the squared scale."""
    if isinstance(scale, Tensor):
        return squares * scale.to(squares) ** 2
    return squares if scale == 1 else squares * scale**2


def _settled(factor: Factor, gradients: Tensor) -> Factor:
    """Replaces the innermost factor, whose order of entries the gradients have."""
    if isinstance(factor, Rearranged):
        return Rearranged(_settled(factor.each, gradients), factor.order, factor.sizes)
    return Dense(gradients.view(factor.shape))


def _is_faster_dense(factor: Factor) -> bool:
    """Whether multiplying once, and reading the gradients twice, beats multiplying twice.

    In half precision, multiplying is faster than writing the gradients.
    """
    if not isinstance(factor, OuterProduct | Convolution):
        return False
    return factor.positions > 1 and wide(factor.dtype) is factor.dtype


def _is_worth_keeping_dense(factor: Factor) -> bool:
    """Whether the gradients take less memory than the factor, or little more and save much time."""
    kind = type(factor)
    if kind is Dense or (isinstance(factor, PositionSum) and factor.grad_output.shape[1] == 1):
        return False  # the factor is the gradient, and the weight's factor holds it too
    dtype = factor.dtype
    bytes_dense = prod(factor.shape) * wide(dtype).itemsize
    sizes = bytes_dense, factor.size * dtype.itemsize, kind is Convolution
    way = chooser_for(machine_on(factor.device), False).pick("kept for later", sizes)
    return way == "gradients"
