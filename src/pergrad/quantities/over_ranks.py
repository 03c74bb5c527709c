"""Defines `OverRanks`: a sum over the samples of one rank, which can be summed over all ranks."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self, TypeVar

from torch import Tensor

from pergrad.distributed.groups import Ranks, Summing
from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError
from pergrad.quantities.base import Batch, Reduction
from pergrad.runtime import wide

__all__ = ["OverRanks"]

R = TypeVar("R")


class OverRanks(Reduction[R]):
    """Holds the reduction of the samples of this rank, and after `all_reduce` of the samples of all ranks.

    Sums of sharded parameters are not kept whole: they are summed over ranks as they arrive, and so is all
    else when the block ends. `all_reduce` then has nothing left to do.
    """

    sums_over_ranks: ClassVar[bool] = True
    takes_shards: ClassVar[bool] = True
    spans_stages: ClassVar[bool] = True
    is_reduced = False  # whether the samples of all ranks are in the result, by `all_reduce`
    is_sharded = False  # the same, since parameters are sharded

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._spread: Spread = batch.spread
        self.is_reduced = self.is_sharded = False

    def end(self) -> None:
        super().end()
        shards = self._spread.shards
        if shards is not None:
            self._result = self.reduced(shards)
            self.is_sharded = True

    def shard_of_sum(self, name: str, total: Tensor | None, *, is_real: bool = False) -> Tensor:
        """Returns this rank's shard of a sum over ranks; None stands for zeros."""
        shards = self._spread.shards
        assert shards is not None
        dtype = wide(self.batch.parameters[name].dtype)
        dtype = dtype.to_real() if is_real else dtype
        if total is None:
            total = self.batch.zeros(name, dtype, of_shard=True)
        total = total.to(dtype)
        return self.batch.stored(shards.shard_of_sum(name, total))

    def all_reduce(self, group: Ranks = None) -> Self:
        """Turns the result into that of the samples of all ranks, in place; every rank must call it.

        Ranks may have different numbers of samples, or none. By default all ranks of the wrapper take part,
        or all of the job.
        """
        self._of_ended(self._result)
        if self.is_reduced:
            raise PergradError(
                f"{type(self).__name__} is summed over the ranks already: a second all_reduce would count "
                "every sample several times"
            )
        if self.is_sharded:
            self._spread.check_mesh(group)
        else:
            self._result = self.reduced(self._spread.group(group))
        self.is_reduced = True
        return self

    @abstractmethod
    def reduced(self, group: Summing) -> R:
        """Returns the result of the samples of all ranks."""

    def __iadd__(self, other: Self) -> Self:
        if isinstance(other, OverRanks) and self.has_ended and other.is_reduced != self.is_reduced:
            raise PergradError(
                f"one {type(self).__name__} is summed over the ranks and the other is not: add them first, "
                "then call all_reduce"
            )
        return super().__iadd__(other)
