"""Defines `NoiseScale`: how noisy the gradient of a batch is, and which batch size pays off."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.quantities.base import Batch, Reduction
from pergrad.reductions import SampleGradients

__all__ = ["NoiseScale"]


class NoiseScale(Reduction[Any]):
    """The simple noise scale tr(Σ) / |G|² (McCandlish et al., 2018), `.result` a float.

    Σ is the covariance of a sample's gradient, G its expectation; both are estimated without bias:
    `.trace` = (Σ_n |g_n|² - |Σ_n g_n|² / B) / (B - 1), `.squared_mean` = |Σ_n g_n|² / B² - trace / B. Batches
    up to about the noise scale pay off. If noise outweighs the mean, the estimate `.squared_mean` may be
    negative, and so may the noise scale: the batch is too small to tell.

    One object may be used for many steps: `.running` is then the ratio of the exponential averages of the
    two moments, which is less noisy. `a += b` gives the noise scale over the samples of both.

    Args:
        decay: the decay of the averages behind `.running`.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.NoiseScale()) as noise:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 4.0]])).sum().backward()
    >>> round(noise.trace, 3), round(noise.squared_mean, 3), round(noise.result, 3)
    (2.0, 19.0, 0.105)
    """

    def __init__(self, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise PergradError(f"decay must be in [0, 1), got {decay}")
        self._decay = decay
        self._averages: Tensor | None = None  # of trace and squared mean

    @property
    def trace(self) -> float:
        """Returns an unbiased estimate of tr(Σ)."""
        return float(self._estimates()[0])

    @property
    def squared_mean(self) -> float:
        """Returns an unbiased estimate of |G|²."""
        return float(self._estimates()[1])

    @property
    def result(self) -> float:
        trace, mean = self._estimates()
        return float(trace / mean)

    @property
    def running(self) -> float:
        """Returns the noise scale over the blocks so far, recent ones weighted more."""
        if self._averages is None:
            self._estimates()  # raises: no block has ended yet, or none with two samples
        trace, mean = self._of_ended(self._averages)
        return float(trace / mean)

    @property
    def settings(self) -> tuple[Any, ...]:
        return (self._decay,)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._squares = torch.zeros((), dtype=torch.float64, device=batch.device)

    def clear(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self._squares = self._squares + gradients.squared_norms().sum()
        self._totals[name] = self.batch.stored(gradients.total())

    def finish(self) -> _Sums:
        return _Sums(self.batch.size, self.batch.stored(self._squares), self._totals)

    def settle(self) -> None:
        sums: _Sums = self._of_ended(self._result)
        if sums.samples > 1:
            now = sums.estimates()
            before = torch.zeros_like(now) if self._averages is None else self._averages
            self._averages = self._decay * before + (1 - self._decay) * now

    def merge(self, other: NoiseScale) -> None:
        self._result = self._of_ended(self._result).joined(other._of_ended(other._result))

    def _estimates(self) -> Tensor:
        sums: _Sums = self._of_ended(self._result)
        if sums.samples < 2:
            raise PergradError(
                "the noise scale of a single sample is not defined: use a batch of two or more, or add "
                "further batches with +="
            )
        return sums.estimates()


class _Sums(NamedTuple):
    """Holds Σ_n |g_n|² over a number of samples, and Σ_n g_n of each parameter."""

    samples: int
    squares: Tensor
    totals: dict[str, Tensor]

    def estimates(self) -> Tensor:
        """Computes tr(Σ) and |G|² on the device, without synchronising."""
        totals = [torch.view_as_real(t) if t.is_complex() else t for t in self.totals.values()]
        lengths = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in totals]
        total = torch.stack(lengths).square().sum()
        trace = (self.squares - total / self.samples) / (self.samples - 1)
        return torch.stack([trace, total / self.samples**2 - trace / self.samples])

    def joined(self, other: _Sums) -> _Sums:
        totals = dict(self.totals)
        for name, total in other.totals.items():
            totals[name] = totals[name] + total if name in totals else total
        return _Sums(self.samples + other.samples, self.squares + other.squares, totals)
