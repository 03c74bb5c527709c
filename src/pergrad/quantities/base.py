"""What a quantity is: an object that reduces the gradients of each parameter and holds the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from pergrad.errors import PergradError, ScopeError
from pergrad.reductions import SampleGradients
from pergrad.runtime import wide
from pergrad.runtime.queue import Queue

__all__ = ["Batch", "Quantity", "Reduction", "joined_samples", "or_zeros"]

R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True)
class Batch:
    """Tells a quantity the batch's size, the parameters by name, and where to put results.

    `queue` takes work that is faster when done for many parameters at once.
    """

    size: int
    parameters: Mapping[str, Tensor]
    offload: bool = False
    queue: Queue = field(default_factory=Queue, repr=False, compare=False)

    @cached_property
    def device(self) -> torch.device:
        for p in self.parameters.values():
            return p.device
        return torch.device("cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of results over all parameters: float64 if any parameter has it, else float32."""
        dtypes = [p.dtype for p in self.parameters.values()]
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def stored(self, result: Tensor) -> Tensor:
        """The result where the user wants it."""
        return result.cpu() if self.offload else result


class Quantity(ABC):
    """Reduces per-sample gradients as they arrive in the backward pass.

    The engine calls `begin` once, `consume` for a parameter as soon as all of its uses have arrived, and
    `end` once. A parameter that the loss does not reach is never consumed: its gradients are zero.

    Of two of a kind, `a += b` is the quantity of the samples of both: what is summed over samples adds up,
    what has an entry for each sample is joined, in order.
    """

    is_linear: bool = False  # then a second backward may add to the same parameter
    # Those that hold gradients go first: others then take what was made.
    priority: ClassVar[int] = 2
    passes: int = 1  # backwards that it needs; a second one is run by the engine

    @abstractmethod
    def begin(self, batch: Batch) -> None: ...

    @abstractmethod
    def consume(self, name: str, gradients: SampleGradients) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def settle(self) -> None:  # noqa: B027  # most have nothing to do
        """The block is over: update what goes on from one block to the next. Never part of a trace."""

    def end_pass(self) -> None:  # noqa: B027  # most have one pass
        """Of several backwards, one that is not the last is over."""

    def abandon(self) -> None:  # noqa: B027  # not everyone holds something
        """After an error, in the place of `end`: let go of what has been computed."""

    def merge(self, other: Any) -> None:
        """Take in the samples of another one; both have ended."""
        raise PergradError(
            f"{type(self).__name__} has no rule to join two batches: record all samples in one block"
        )

    def __iadd__(self, other: Self) -> Self:
        if type(other) is not type(self) or other.settings != self.settings:
            raise PergradError(
                f"only a {type(self).__name__} with the same settings {self.settings} can be added, got "
                f"{type(other).__name__} {getattr(other, 'settings', '')}".rstrip()
            )
        if self.has_ended:
            self.merge(other)
        else:
            self.copy(other)
        return self

    def copy(self, other: Any) -> None:
        """Take over the result of another one, having none."""
        self.__dict__.update(other.__dict__)

    @property
    def settings(self) -> tuple[Any, ...]:
        """What two of a kind must agree in to be added."""
        return ()

    @property
    def has_ended(self) -> bool:
        """Whether there is a result; `merge` is not called before there is."""
        return True


class Reduction(Quantity, Generic[R]):
    """A quantity with the batch at hand while it is computed, and a `result` when it has ended."""

    _batch: Batch | None = None
    _result: R | None = None
    _recorded: tuple[str, ...] = ()  # the names of the parameters

    @property
    def batch(self) -> Batch:
        """What is being recorded."""
        assert self._batch is not None, "there is a batch between `begin` and `end` only"
        return self._batch

    @property
    def result(self) -> R:
        return self._of_ended(self._result)

    @property
    def has_ended(self) -> bool:
        return self._result is not None

    def __iadd__(self, other: Self) -> Self:
        if isinstance(other, Reduction):
            other._of_ended(other._result)
            if self.has_ended and other._recorded != self._recorded:
                only = sorted({*self._recorded} ^ {*other._recorded})
                raise PergradError(f"the two have different parameters: {only} only in one of them")
        return super().__iadd__(other)

    def begin(self, batch: Batch) -> None:
        self.clear()
        self._batch, self._result = batch, None
        self._recorded = tuple(batch.parameters)

    def end(self) -> None:
        self._result = self.finish()
        self.abandon()

    def abandon(self) -> None:
        self.clear()
        self._batch = None

    def clear(self) -> None:  # what is small may stay
        """Hold nothing of any parameter: before the first, after the last and after an error."""

    @abstractmethod
    def finish(self) -> R:
        """The result, once all parameters have been consumed."""

    def _of_ended(self, value: V | None) -> V:
        """The value, or an error while there is none."""
        if value is None:
            raise ScopeError(
                f"{type(self).__name__} has no result yet: leave the `record` block first"
            )
        return value


def joined_samples(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(n, ...) and (m, ...) of each parameter -> (n + m, ...)."""
    return {name: torch.cat([a[name], b[name]]) for name in a}


def or_zeros(found: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """For every parameter, in order; zeros for those that the loss does not reach."""
    return {
        name: found[name]
        if name in found
        else batch.stored(torch.zeros_like(p, dtype=wide(p.dtype)))
        for name, p in batch.parameters.items()
    }
