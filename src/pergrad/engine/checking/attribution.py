"""Proves attribution: Σ_n r_n g_n as recorded is the ordinary gradient of Σ_n r_n ℓ_n, for random r.

One wrong gradient of one sample makes the two differ, whatever the others are, except with probability zero.
Large matrices are compared in random directions first, which takes an eighth of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from pergrad.quantities.base import Batch, Reduction, or_zeros
from pergrad.reductions import Directions, SampleGradients, SampleWeights
from pergrad.reductions.directions import COUNT
from pergrad.runtime import internals
from pergrad.runtime.tolerances import (
    extremes,
    largest,
    largest_differences,
    largest_of_each,
)

__all__ = ["Attribution", "Judge", "coarsest", "random_weights"]


class Attribution(Reduction[dict[str, Tensor]]):
    """Σ_n r_n g_n of every parameter, for random weights r; `.precision` are the dtypes it came from.

    With `in_directions`, large matrices are summed in random directions.
    """

    is_linear = True
    priority: ClassVar[int] = 1  # before `Norms`, which may need the same gradients

    def __init__(
        self,
        generator: torch.Generator,
        weights: Tensor | None = None,
        *,
        in_directions: bool = False,
    ) -> None:
        self.generator = generator
        self._given = weights
        self._has_directions = in_directions
        self.weights = torch.empty(0, dtype=torch.float64)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.parameters = dict(batch.parameters)
        self.units = batch.units
        self.precision: dict[str, torch.dtype] = {}
        has_directions = self._has_directions and not internals.is_any_autocast_enabled()
        entries = Directions.rows * COUNT if has_directions else 0
        own = batch.size if self._given is None else 0
        drawn = random_weights(own + entries, self.generator)
        weights = drawn[:own] if self._given is None else self._given
        self.weights = weights.to(batch.device)
        self._weights = SampleWeights(self.weights, drops_any=False)
        self._directions: Directions | None = None
        if has_directions:
            self._directions = Directions(drawn[own:].view(-1, COUNT))
        self._directed: set[str] = set()  # the parameters that are summed in directions

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self.precision[name] = gradients.dtype
        directions = self._directions
        if directions is not None and not directions.pay_for(gradients.factors):
            directions = None
        if directions is not None and name not in self._sums:
            self._directed.add(name)
        if name in self._directed and directions is None:  # another backward, by other factors
            assert self._directions is not None
            found = self._directions.of(gradients.weighted_sum(self._weights))
        else:
            directions = directions if name in self._directed else None
            found = gradients.weighted_sum_and_norms(self._weights, directions)
        self._sums[name] = self._sums[name] + found if name in self._sums else found

    def finish(self) -> dict[str, Tensor]:
        if self._directions is not None:
            self._directions.forget_last()
        return or_zeros(self._sums, self.batch)

    @property
    def is_whole(self) -> bool:
        """Whether all sums are entry by entry."""
        return not self._directed

    def views(self, sizes: dict[str, list[Tensor]]) -> dict[str, Callable[[Tensor], Tensor]]:
        """Returns functions that give other sums as `result` has its own, and note their extreme entries.

        There is one for each parameter that is summed in directions.
        """
        return {name: partial(self._viewed, name, sizes) for name in self._directed}

    def _viewed(self, name: str, sizes: dict[str, list[Tensor]], total: Tensor) -> Tensor:
        assert self._directions is not None
        sizes[name] = extremes(total)
        return self._directions.of(total)

    def least_error(self, name: str, error: float, shape: Sequence[int]) -> float:
        """Returns how far off the entries of a sum are, at least, if what `result` has is off by `error`."""
        if self._directions is None or name not in self._directed:
            return 0.0
        return self._directions.least_error(error, shape)


def random_weights(size: int, generator: torch.Generator) -> Tensor:
    """Draws weights of either sign between 1 and 2: none is close to zero, where a sample could hide."""
    drawn = torch.empty(size, dtype=torch.float64, device="cpu")
    drawn.uniform_(-1, 1, generator=generator)
    return drawn.add_(_ONE.copysign(drawn))


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the dtype that rounds most."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Judge:
    """Says how far two sums of each parameter are apart, relative to the larger of sum and noise."""

    dtype: torch.dtype  # that the sums are computed in

    @property
    def tolerance(self) -> float:
        """Returns the largest error that rounding explains."""
        return _TOLERANCE[self.dtype]

    @property
    def tolerance_of_reports(self) -> float:
        """Returns the largest error of what is reported for one sample, by two different computations."""
        return _OF_REPORTS[self.dtype]

    def errors(
        self,
        found: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        scales: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Returns the relative error of each parameter; `scales` are the sizes to compare with."""
        sizes = scales or dict(zip(wanted, largest_of_each(wanted.values()), strict=True))
        noise = _NOISE[self.dtype] * max(sizes.values(), default=0.0)
        apart = _distances([(found[name], want) for name, want in wanted.items()])
        return {
            name: _relative(distance, max(sizes[name], noise))
            for name, distance in zip(wanted, apart, strict=True)
        }

    def error(self, found: Tensor, wanted: Tensor, terms: float) -> float:
        """Returns max |found - wanted|, relative to the largest entry or the noise of terms that cancel."""
        scale = max(largest(wanted), _NOISE[self.dtype] * terms)
        return _relative(_distances([(found, wanted)])[0], scale)


_ONE = torch.ones((), dtype=torch.float64, device="cpu")


def _distances(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Returns max |found - wanted| of each pair; infinity where the shapes differ."""
    known = [(a.to(b.device), b) for a, b in pairs if a.shape == b.shape]
    apart = iter(largest_differences(known))
    return [next(apart) if a.shape == b.shape else float("inf") for a, b in pairs]


def _relative(distance: float, scale: float) -> float:
    return distance / scale if scale else distance


# The largest error of a sum, relative to its largest entry, that rounding explains.
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.05,
}
_OF_REPORTS = {torch.float64: 1e-7, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
# A sum below this share of the model's largest one is compared as if it had this size: some gradients are
# zero but for rounding, such as that of the bias of attention keys.
_NOISE = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
