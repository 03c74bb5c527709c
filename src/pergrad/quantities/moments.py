"""Defines `SecondMoment` and `Variance`: elementwise moments of gradients over the samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.quantities.base import Reduction, or_zeros
from pergrad.reductions import SampleGradients

__all__ = ["SecondMoment", "Variance"]


class SecondMoment(Reduction[dict[str, Tensor]]):
    """Σ_n g_n², elementwise: `.result[name]` of the parameter's shape, in float32 or float64.

    `a += b` adds the sums. An entry is not finite if that of some gradient is not.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.SecondMoment()) as moment:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).sum().backward()
    >>> moment.result["weight"]
    tensor([[10., 16.]])
    """

    def clear(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self._sums[name] = self.batch.stored(gradients.sum_of_squares())

    def finish(self) -> dict[str, Tensor]:
        return or_zeros(self._sums, self.batch, are_real=True)

    def merge(self, other: SecondMoment) -> None:
        self._result = {name: a + other.result[name] for name, a in self.result.items()}


class _Moments(NamedTuple):
    """Holds the mean over a number of samples, and the sum of squares about it."""

    samples: int
    means: dict[str, Tensor]
    squares: dict[str, Tensor]

    def joined(self, other: _Moments) -> _Moments:
        """Σ (x - m)² over both = Σ_a + Σ_b + (m_a - m_b)² ab / (a + b)."""
        a, b = self.samples, other.samples
        apart = {name: other.means[name] - mean for name, mean in self.means.items()}
        return _Moments(
            a + b,
            {name: mean + apart[name] * (b / (a + b)) for name, mean in self.means.items()},
            {
                name: squares + other.squares[name] + _squared(apart[name]) * (a * b / (a + b))
                for name, squares in self.squares.items()
            },
        )


def _squared(t: Tensor) -> Tensor:
    """|t|², elementwise; real."""
    return torch.view_as_real(t).square().sum(-1) if t.is_complex() else t.square()


class Variance(Reduction[Any]):
    """The unbiased variance of g_n over the samples, elementwise: `.result[name]` of the parameter's shape.

    `.mean[name]` is the mean gradient, `.count` the number of samples. Squares are taken about the mean, so
    nothing cancels if the mean is large. `a += b` gives the variance over the samples of both.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.Variance()) as variance:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 0.0]])).sum().backward()
    >>> variance.result["weight"], variance.mean["weight"]
    (tensor([[2., 8.]]), tensor([[2., 2.]]))
    """

    @property
    def result(self) -> dict[str, Tensor]:
        moments = self._of_ended(self._result)
        if moments.samples < 2:
            raise PergradError(
                "the variance of a single sample is not defined: use a batch of two or more, or add "
                "further batches with +="
            )
        return {name: squares / (moments.samples - 1) for name, squares in moments.squares.items()}

    @property
    def mean(self) -> dict[str, Tensor]:
        return self._of_ended(self._result).means

    @property
    def count(self) -> int:
        return self._of_ended(self._result).samples

    def clear(self) -> None:
        self._means: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        mean = gradients.total() / self.batch.size
        self._means[name] = self.batch.stored(mean)
        self._squares[name] = self.batch.stored(gradients.squares_about(mean))

    def finish(self) -> _Moments:
        means = or_zeros(self._means, self.batch)
        squares = or_zeros(self._squares, self.batch, are_real=True)
        return _Moments(self.batch.size, means, squares)

    def merge(self, other: Variance) -> None:
        self._result = self._of_ended(self._result).joined(other._of_ended(other._result))
