"""Defines `SecondMoment` and `Variance`: elementwise moments of gradients over the samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pergrad.distributed.groups import Summing
from pergrad.errors import PergradError
from pergrad.quantities.base import counted, or_zeros, shown
from pergrad.quantities.over_ranks import OverRanks
from pergrad.reductions import SampleGradients

__all__ = ["SecondMoment", "Variance"]


class SecondMoment(OverRanks[dict[str, Tensor]]):
    """Σ_n g_n², elementwise: `.result[name]` of the parameter's shape, in float32 or float64.

    `a += b` adds the sums, `.all_reduce()` those of all ranks. An entry is not finite if that of some
    gradient is not.

    Args:
        accumulate: add the squares of further blocks.

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

    def sum_over_ranks(self, name: str) -> None:
        self._sums[name] = self.shard_of_sum(name, self._sums.get(name), is_real=True)

    def finish(self) -> dict[str, Tensor]:
        return or_zeros(self._sums, self.batch, are_real=True, of_shards=True)

    def reduced(self, group: Summing) -> dict[str, Tensor]:
        return group.sum(self.result)

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
        if not a or not b:
            return self if a else other
        apart = {name: other.means[name] - mean for name, mean in self.means.items()}
        return _Moments(
            a + b,
            {name: mean + apart[name] * (b / (a + b)) for name, mean in self.means.items()},
            {
                name: squares + other.squares[name] + _squared(apart[name]) * (a * b / (a + b))
                for name, squares in self.squares.items()
            },
        )

    def over(self, group: Summing) -> _Moments:
        """Σ_r [Σ_n (x - m_r)² + n_r (m_r - m)²], with the mean m over the samples of all ranks r."""
        own = self.samples
        samples = group.count(own)
        if samples == 0:
            return self
        whole = [name for name, mean in self.means.items() if not group.is_summed(mean)]
        totals = {
            name: self.means[name] * own if own else _zeros(self.means[name]) for name in whole
        }
        means = {name: total / samples for name, total in group.sum(totals).items()}
        squares = {
            name: self.squares[name] + own * _squared(self.means[name] - means[name])
            if own
            else _zeros(self.squares[name])
            for name in whole
        }
        return _Moments(samples, self.means | means, self.squares | group.sum(squares))


def _zeros(t: Tensor) -> Tensor:
    """Returns zeros, for a rank without samples: it has no mean."""
    return torch.zeros_like(t)


def _squared(t: Tensor) -> Tensor:
    """|t|², elementwise; real."""
    return torch.view_as_real(t).square().sum(-1) if t.is_complex() else t.square()


class Variance(OverRanks[Any]):
    """The unbiased variance of g_n over the samples, elementwise: `.result[name]` of the parameter's shape.

    `.mean[name]` is the mean gradient, `.count` the number of samples. Squares are taken about the mean, so
    nothing cancels if the mean is large. `a += b` gives the variance over the samples of both,
    `.all_reduce()` that over the samples of all ranks.

    Args:
        accumulate: include the samples of further blocks.

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
                f"the variance of {counted(moments.samples, 'sample')} is not defined: use a batch of two or "
                "more, or add further batches with +="
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
        self._of_all: int | None = None  # samples of all ranks, if parameters are sharded

    def consume(self, name: str, gradients: SampleGradients) -> None:
        mean = gradients.total() / max(self.batch.size, 1)
        self._means[name] = self.batch.stored(mean)
        self._squares[name] = self.batch.stored(gradients.squares_about(mean))

    def _shown_result(self) -> str:
        return shown(self.mean)

    def sum_over_ranks(self, name: str) -> None:
        shards, own = self._spread.shards, self.batch.size
        assert shards is not None
        if self._of_all is None:
            self._of_all = shards.count(own)
        mean = self._means.pop(name, None)
        total = self.shard_of_sum(name, None if mean is None else mean * own)
        self._means[name] = total / max(self._of_all, 1)
        apart = -shards.whole(name, self._means[name])
        apart = apart if mean is None else apart + mean
        squares = own * _squared(apart) + self._squares.pop(name, 0.0)
        self._squares[name] = self.shard_of_sum(name, squares, is_real=True)

    def finish(self) -> _Moments:
        means = or_zeros(self._means, self.batch, of_shards=True)
        squares = or_zeros(self._squares, self.batch, are_real=True, of_shards=True)
        return _Moments(self.batch.size, means, squares)

    def reduced(self, group: Summing) -> _Moments:
        return self._of_ended(self._result).over(group)

    def merge(self, other: Variance) -> None:
        self._result = self._of_ended(self._result).joined(other._of_ended(other._result))
