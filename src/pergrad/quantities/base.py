"""Defines `Quantity`, an object that reduces the gradients of each parameter and holds the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from pergrad.errors import PergradError, ScopeError
from pergrad.reductions import SampleGradients
from pergrad.runtime import wide
from pergrad.runtime.queue import Queue

__all__ = [
    "Batch",
    "Quantity",
    "Reduction",
    "SampleReport",
    "joined_samples",
    "norms_of",
    "or_zeros",
]

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
        """Returns the dtype of results over all parameters: float64 if any parameter has it, else float32."""
        dtypes = [p.dtype for p in self.parameters.values()]
        is_double = torch.float64 in dtypes or torch.complex128 in dtypes
        return torch.float64 if is_double else torch.float32

    def stored(self, result: Tensor) -> Tensor:
        """Moves a result to the CPU if `offload` is set."""
        return result.cpu() if self.offload else result


class SampleReport(NamedTuple):
    """Compares what a quantity reports for one sample with what that sample's own gradient gives."""

    found: Tensor
    expected: Tensor
    scale: float = 0.0  # the size of the terms of a sum that may cancel


class Quantity(ABC):
    """Reduces per-sample gradients as they arrive in the backward pass.

    The engine calls `begin` once, `consume` for a parameter as soon as all of its uses have arrived, and
    `end` once. A parameter that the loss does not reach is never consumed: its gradients are zero.

    `a += b` gives the quantity of the samples of both: sums over samples are added, results per sample are
    concatenated.
    """

    is_linear: bool = False  # True: a second backward may add to the same parameter
    # Lowest first. Quantities that keep gradients come first, so that others can reuse them.
    priority: ClassVar[int] = 2
    passes: int = 1  # backward passes that it needs; the engine runs the second one

    @abstractmethod
    def begin(self, batch: Batch) -> None: ...

    @abstractmethod
    def consume(self, name: str, gradients: SampleGradients) -> None: ...

    @abstractmethod
    def end(self) -> None: ...

    def settle(self) -> None:  # noqa: B027  # most have nothing to do
        """Updates state that lasts over several blocks, after a block has ended. Never traced."""

    def end_pass(self) -> None:  # noqa: B027  # most have one pass
        """Called after each backward pass but the last."""

    def abandon(self) -> None:  # noqa: B027  # some hold nothing
        """Called instead of `end` after an error: frees partial results."""

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport | None:
        """Returns what is reported for one sample, and what its gradient gives, by name of parameter.

        The certificate compares the two. None: nothing is reported for single samples.
        """
        return None

    def merge(self, other: Any) -> None:
        """Adds the samples of another quantity of this kind; both have ended."""
        raise PergradError(
            f"{type(self).__name__} cannot join two batches: record all samples in one block"
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
        """Copies the result of another quantity; called if this one has none."""
        self.__dict__.update(other.__dict__)

    @property
    def settings(self) -> tuple[Any, ...]:
        """Returns the settings in which two quantities must agree to be added."""
        return ()

    @property
    def has_ended(self) -> bool:
        """Whether there is a result; `merge` is only called if there is."""
        return True


class Reduction(Quantity, Generic[R]):
    """Holds the batch while it is recorded, and a `result` when it has ended."""

    _batch: Batch | None = None
    _result: R | None = None
    _recorded: tuple[str, ...] = ()  # the names of the parameters

    @property
    def batch(self) -> Batch:
        """Returns the batch that is being recorded."""
        assert self._batch is not None, "`batch` is set between `begin` and `end` only"
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

    def clear(self) -> None:
        """Frees the tensors of all parameters; called by `begin`, after `finish` and after an error."""

    @abstractmethod
    def finish(self) -> R:
        """Returns the result; called when all parameters have been consumed."""

    def _of_ended(self, value: V | None) -> V:
        """Returns the value, or raises if the block has not ended."""
        if value is None:
            raise ScopeError(
                f"{type(self).__name__} has no result yet: leave the `record` block first"
            )
        return value


def joined_samples(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenates (n, ...) and (m, ...) of each parameter to (n + m, ...)."""
    return {name: torch.cat([a[name], b[name]]) for name in a}


def norms_of(gradient: Mapping[str, Tensor]) -> Tensor:
    """Returns the norm of each parameter's gradient, in float64."""
    found = [
        torch.linalg.vector_norm(g if g.is_complex() else g.double()).double()
        for g in gradient.values()
    ]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def or_zeros(
    found: Mapping[str, Tensor], batch: Batch, *, are_real: bool = False
) -> dict[str, Tensor]:
    """Returns a value for every parameter, in order; zeros for those that the loss does not reach.

    With `are_real`, values of complex parameters are real, as squares are.
    """
    values = dict(found)
    for name, p in batch.parameters.items():
        if name not in found:
            dtype = wide(p.dtype).to_real() if are_real else wide(p.dtype)
            values[name] = batch.stored(torch.zeros_like(p, dtype=dtype))
    return {name: values[name] for name in batch.parameters}
