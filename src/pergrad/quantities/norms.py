"""Defines `Norms`: the L2 norm of each sample's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from pergrad.distributed.groups import Ranks
from pergrad.distributed.spread import Spread
from pergrad.quantities.base import Batch, Reduction, SampleReport, joined_samples, norms_of
from pergrad.reductions import SampleGradients, SquaredNorms

__all__ = ["Norms"]


class Norms(Reduction[Tensor]):
    """|g_n| over all recorded parameters, `.result` (B,); of each one, `.per_param[name]` (B,).

    Results are in float32, or float64 for a model in float64; sums are always taken in float64. A gradient
    that is not finite gives a norm that is not finite, for this sample only. In float32, entries beyond
    1e19 do so too, since their squares overflow. `a += b` concatenates the samples, `.all_gather()` those of
    all ranks.

    Args:
        accumulate: append the samples of further blocks.

    >>> import torch, pergrad
    >>> model = torch.nn.Linear(2, 1)
    >>> with pergrad.record(model, pergrad.Norms()) as norms:
    ...     model(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).sum().backward()
    >>> norms.result, norms.per_param["weight"]
    (tensor([5.0990, 1.0000]), tensor([5., 0.]))
    """

    sums_samples: ClassVar[bool] = False
    takes_shards: ClassVar[bool] = True
    spans_stages: ClassVar[bool] = True
    _of_each: tuple[list[str], Tensor] | None = None  # parameters, and (parameters, n)

    @property
    def per_param(self) -> dict[str, Tensor]:
        names, each = self._of_ended(self._of_each)
        found = dict(zip(names, each, strict=True))
        return {name: found[name] for name in self._recorded}

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._of_each = None
        self._spread: Spread = batch.spread

    def reset(self) -> None:
        super().reset()
        self._of_each = None

    def clear(self) -> None:
        self._squares: SquaredNorms | None = None

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if self._squares is None:
            assert self._batch is not None
            self._squares = SquaredNorms(self._batch.queue)
        self._squares.add(name, gradients)

    def finish(self) -> Tensor:
        batch = self._batch
        assert batch is not None
        names: list[str] = []
        squares: Tensor | None = None
        if self._squares is not None:
            names, squares = self._squares.found()
        unreached: list[str] = []
        if len(names) < len(batch.parameters):
            reached = {*names}
            unreached = [name for name in batch.parameters if name not in reached]
        if squares is None or unreached:
            zeros = torch.zeros(
                len(unreached), batch.size, dtype=torch.float64, device=batch.device
            )
            squares = zeros if squares is None else torch.cat([squares, zeros])
        spread = batch.spread
        if spread.tensor_parallel is not None:
            squares = spread.joined([*names, *unreached], squares)
        each = batch.stored(squares.sqrt().to(batch.dtype))
        self._of_each = [*names, *unreached], each
        total = squares.sum(0)
        if spread.pipeline is not None:
            total = spread.over_stages(total)
        return batch.stored(total.sqrt().to(batch.dtype))

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        each = self.per_param
        found = torch.stack([self.result[number], *(each[name][number] for name in gradient)])
        own = norms_of(gradient)
        return SampleReport(found, torch.cat([own.norm()[None], own]))

    def merge(self, other: Norms) -> None:
        joined = joined_samples(self.per_param, other.per_param)
        self._of_each = list(joined), torch.stack(list(joined.values()))
        self._result = torch.cat([self.result, other.result])

    def all_gather(self, group: Ranks = None) -> Self:
        """Concatenates the samples of all ranks, in their order, in place; every rank must call it.

        Ranks may have different numbers of samples, or none. By default all ranks of the wrapper take part,
        or all of the job.
        """
        ranks, each = self._spread.group(group), self.per_param
        ranks.agree("norms", (list(each), self.result.dtype))
        rows = ranks.gather(torch.stack([*each.values(), self.result]))
        self._of_each, self._result = (list(each), rows[:-1]), rows[-1]
        return self
