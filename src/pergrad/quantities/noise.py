"""Defines `NoiseScale`: how noisy the gradient of a batch is, and which batch size pays off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pergrad.distributed.groups import Ranks, Summing
from pergrad.distributed.sharding import is_sharded, length_over_ranks
from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError
from pergrad.quantities.base import Batch, counted, or_zeros
from pergrad.quantities.over_ranks import OverRanks
from pergrad.reductions import SampleGradients

__all__ = ["NoiseScale"]


class NoiseScale(OverRanks[Any]):
    """The simple noise scale tr(Σ) / |G|² (McCandlish et al., 2018), `.result` a float.

    Σ is the covariance of a sample's gradient, G its expectation; both are estimated without bias:
    `.trace` = (Σ_n |g_n|² - |Σ_n g_n|² / B) / (B - 1), `.squared_mean` = |Σ_n g_n|² / B² - trace / B. Batches
    up to about the noise scale pay off. If noise outweighs the mean, the estimate `.squared_mean` may be
    negative, and so may the noise scale: the batch is too small to tell.

    One object may be used for many steps: `.running` is then the ratio of the exponential averages of the
    two moments, which is less noisy. `a += b` gives the noise scale over the samples of both, `.all_reduce()`
    that over the samples of all ranks, for `.running` too.

    Args:
        decay: the decay of the averages behind `.running`.
        accumulate: include the samples of all blocks in `.result`, which is otherwise that of the last one.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> with pergrad.record(model, pergrad.NoiseScale()) as noise:
    ...     model(torch.tensor([[3.0, 4.0], [1.0, 4.0]])).sum().backward()
    >>> round(noise.trace, 3), round(noise.squared_mean, 3), round(noise.result, 3)
    (2.0, 19.0, 0.105)
    """

    spans_blocks: ClassVar[bool] = True

    def __init__(self, decay: float = 0.95, *, accumulate: bool = False) -> None:
        super().__init__(accumulate=accumulate)
        if not 0 <= decay < 1:
            raise PergradError(f"decay must be in [0, 1), got {decay}")
        self._decay = decay
        self._averages: Tensor | None = None  # of trace and squared mean
        self._earlier: Tensor | None = None  # the same, without the last block

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

    def _shown_settings(self) -> list[str]:
        return [f"decay={self._decay}", *super()._shown_settings()]

    def _shown_result(self) -> str:
        return super()._shown_result() if self._samples > 1 else "undefined"

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._zero = torch.zeros(1, 1, dtype=torch.float64, device=batch.device)

    def clear(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}  # Σ_n |g_n|²

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self._squares[name] = gradients.squared_norms().sum()
        self._totals[name] = self.batch.stored(gradients.total())

    def sum_over_ranks(self, name: str) -> None:
        self._totals[name] = self.shard_of_sum(name, self._totals.get(name))

    def finish(self) -> _Sums:
        totals = or_zeros(self._totals, self.batch, of_shards=True)
        names = list(self._squares)
        squares = torch.stack([*self._squares.values()]).unsqueeze(1) if names else self._zero
        spread = self._spread
        squares = self.batch.stored(spread.over_stages(spread.joined(names, squares).sum()))
        found = _Sums(self.batch.size, squares, totals)
        return found if spread.shards is not None else found.measured(spread)

    def reset(self) -> None:
        """Forgets the result, and not the averages behind `.running`."""
        super().reset()

    def settle(self) -> None:
        self._earlier = self._averages
        self._average()

    def _average(self) -> None:
        """Adds the last block to the averages."""
        sums: _Sums = self._of_ended(self._result)
        if sums.samples > 1:
            now = sums.estimates()
            before = torch.zeros_like(now) if self._earlier is None else self._earlier
            self._averages = self._decay * before + (1 - self._decay) * now

    def all_reduce(self, group: Ranks = None) -> Self:
        super().all_reduce(group)
        self._average()
        return self

    def reduced(self, group: Summing) -> _Sums:
        return self._of_ended(self._result).over(group, self._spread)

    def merge(self, other: NoiseScale) -> None:
        sums, more = self._of_ended(self._result), other._of_ended(other._result)
        self._result = sums.joined(more, self._spread)

    def join(self, parts: Sequence[NoiseScale]) -> None:
        averages = self._averages
        super().join(parts)
        self._averages = averages
        self.settle()

    def prepend(self, earlier: NoiseScale) -> None:
        averages, before = self._averages, self._earlier
        super().prepend(earlier)
        self._averages, self._earlier = averages, before

    def _estimates(self) -> Tensor:
        sums: _Sums = self._of_ended(self._result)
        if sums.samples < 2:
            raise PergradError(
                f"the noise scale of {counted(sums.samples, 'sample')} is not defined: use a batch of two or "
                "more, or add further batches with +="
            )
        return sums.estimates()


class _Sums(NamedTuple):
    """Holds Σ_n |g_n|² over a number of samples, and Σ_n g_n of each parameter."""

    samples: int
    squares: Tensor
    totals: dict[str, Tensor]
    length: Tensor | None = None  # |Σ_n g_n|², if all ranks must compute it together

    def estimates(self) -> Tensor:
        """Computes tr(Σ) and |G|² on the device, without synchronising."""
        total = self._length() if self.length is None else self.length
        trace = (self.squares - total / self.samples) / (self.samples - 1)
        return torch.stack([trace, total / self.samples**2 - trace / self.samples])

    def measured(self, spread: Spread) -> _Sums:
        """Returns the sums with their length, if totals are on several ranks; all of them call it."""
        is_spread = any(map(is_sharded, self.totals.values()))
        if not is_spread and spread.pipeline is None:
            return self._replace(length=None)
        length = length_over_ranks(self.totals.values()) if is_spread else self._length()
        return self._replace(length=spread.over_stages(length.to(self.squares.device)))

    def joined(self, other: _Sums, spread: Spread) -> _Sums:
        totals = dict(self.totals)
        for name, total in other.totals.items():
            totals[name] = totals[name] + total if name in totals else total
        samples, squares = self.samples + other.samples, self.squares + other.squares
        found = _Sums(samples, squares, totals)
        return found if self.length is None else found.measured(spread)

    def _length(self) -> Tensor:
        """|Σ_n g_n|² over all parameters."""
        totals = [torch.view_as_real(t) if t.is_complex() else t for t in self.totals.values()]
        lengths = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in totals]
        return torch.stack(lengths).square().sum() if lengths else torch.zeros_like(self.squares)

    def over(self, group: Summing, spread: Spread) -> _Sums:
        squares = group.sum({"squares": self.squares})["squares"]
        totals = group.sum(self.totals)
        return _Sums(group.count(self.samples), squares, totals).measured(spread)
