"""Defines `Quantity`, an object that reduces the gradients of each parameter and holds the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from pergrad.distributed.sharding import is_sharded
from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError, ScopeError
from pergrad.reductions import SampleGradients
from pergrad.runtime import wide
from pergrad.runtime.queue import Queue

__all__ = [
    "Batch",
    "LossUnits",
    "Quantity",
    "Reduction",
    "SampleReport",
    "counted",
    "joined_samples",
    "norms_of",
    "or_zeros",
    "public_names",
    "shown",
]

R = TypeVar("R")
V = TypeVar("V")
_SHOWN = 3  # parameters in a repr


@dataclass
class LossUnits:
    """How the loss of a block came to be; known once its backward pass has begun."""

    how: str | None = None  # "sum" or "mean" over the samples
    scale: Tensor | float = 1.0  # what each sample's gradient is multiplied by, (n,) or one for all
    scalers: tuple[Tensor, ...] = ()  # factors of gradient scalers, which their own step undoes


@dataclass(frozen=True)
class Batch:
    """Tells a quantity the batch's size, the parameters by name, and where to put results.

    `queue` takes work that is faster when done for many parameters at once. `spread` says which wrapper, such
    as DistributedDataParallel, spreads the module over ranks. `units` say how the loss came to be.
    """

    size: int
    parameters: Mapping[str, Tensor]
    offload: bool = False
    queue: Queue = field(default_factory=Queue, repr=False, compare=False)
    spread: Spread = field(default_factory=Spread, repr=False, compare=False)
    units: LossUnits = field(default_factory=LossUnits, repr=False, compare=False)

    @cached_property
    def device(self) -> torch.device:
        if self.spread.shards is not None and self.spread.shards.device is not None:
            return self.spread.shards.device
        for p in self.parameters.values():
            return p.device
        return torch.device("cpu")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of results over all parameters: float64 if any parameter has it, else float32."""
        dtypes = [p.dtype for p in self.parameters.values()]
        is_double = torch.float64 in dtypes or torch.complex128 in dtypes
        return torch.float64 if is_double else torch.float32

    def zeros(self, name: str, dtype: torch.dtype, *, of_shard: bool = False) -> Tensor:
        """Returns zeros of a parameter's shape; with `of_shard`, of a tensor-parallel one's shard."""
        p = self.parameters[name]
        if is_sharded(p):
            shape = self.spread.local_shape(name, p) if of_shard else p.shape
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.zeros_like(p, dtype=dtype)

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
    concatenated. One block fills a quantity: a second one is an error, unless `reset` was called in between,
    or `accumulate` is set, which does `+=` with each further block.
    """

    accumulate: bool = False  # True: further blocks add to the result
    spans_blocks: ClassVar[bool] = False  # True: each block replaces the result of the last
    is_full: bool = False  # set by the engine: a block has ended
    sums_over_ranks: ClassVar[bool] = (
        False  # True: `sum_over_ranks` is called for sharded parameters
    )
    # True: of a tensor-parallel parameter, a DTensor, it gets the gradients of this rank's shard.
    takes_shards: ClassVar[bool] = False
    spans_stages: ClassVar[bool] = False  # True: of a stage of a pipeline, it is right or joined
    # False: no result is a sum of gradients over samples, so a certificate need not prove such sums.
    sums_samples: ClassVar[bool] = True
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

    def sum_over_ranks(self, name: str) -> None:  # noqa: B027  # most stay on their rank
        """Replaces the sum of a sharded parameter by this rank's shard of the sum over all ranks.

        Called once for each, on all ranks in the same order, also if `consume` was not.
        """

    def abandon(self) -> None:  # noqa: B027  # some hold nothing
        """Called instead of `end` after an error: frees partial results."""

    def reset(self) -> None:
        """Forgets the result, so that another block can compute a new one."""
        self.is_full = False

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

    def join(self, parts: Sequence[Any]) -> None:
        """Takes the samples of several parts of one block, in their order; it has none itself."""
        for part in parts:
            self.__iadd__(part)

    def prepend(self, earlier: Any) -> None:
        """Puts the samples of an earlier block in front; called at the end of a block, for `accumulate`."""
        earlier += self
        self.copy(earlier)

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
        return self.is_full

    def __dir__(self) -> list[str]:
        return public_names(self)


class Reduction(Quantity, Generic[R]):
    """Holds the batch while it is recorded, and a `result` when it has ended."""

    _batch: Batch | None = None
    _result: R | None = None
    _recorded: tuple[str, ...] = ()  # the names of the parameters
    _samples: int = 0

    def __init__(self, *, accumulate: bool = False) -> None:
        self.accumulate = accumulate

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the recorded parameters."""
        self._of_ended(self._result)
        return self._recorded

    @property
    def samples(self) -> int:
        """Returns the number of samples behind the result."""
        self._of_ended(self._result)
        return self._samples

    def __repr__(self) -> str:
        """Shows the settings, then the samples, the parameters and the shape of the result.

        >>> from pergrad.quantities import Norms
        >>> Norms(accumulate=True)
        <Norms(accumulate=True): no result yet>
        """
        name = f"{type(self).__name__}({', '.join(self._shown_settings())})"
        if self._batch is not None:
            return f"<{name}: recording {counted(self._batch.size, 'sample')}>"
        if not self.has_ended:
            return f"<{name}: no result yet>"
        samples, names = counted(self._samples, "sample"), counted(len(self._recorded), "parameter")
        return f"<{name}: {samples}, {names}, result {self._shown_result()}>"

    def _shown_settings(self) -> list[str]:
        return ["accumulate=True"] if self.accumulate else []

    def _shown_result(self) -> str:
        return shown(self.result)

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
        samples = self._samples
        super().__iadd__(other)
        if self.has_ended and isinstance(other, Reduction):
            self._samples = samples + other._samples
        return self

    def copy(self, other: Any) -> None:
        accumulate = self.accumulate
        super().copy(other)
        self.accumulate = accumulate

    def begin(self, batch: Batch) -> None:
        self.clear()
        self._batch, self._result = batch, None
        self._recorded, self._samples = tuple(batch.parameters), batch.size

    def end(self) -> None:
        self._result = self.finish()
        self.abandon()

    def reset(self) -> None:
        super().reset()
        self.abandon()
        self._result, self._recorded, self._samples = None, (), 0

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


def public_names(of: Any) -> list[str]:
    """Lists the public attributes of an object, for completion."""
    return [name for name in object.__dir__(of) if not name.startswith("_")]


def counted(number: int, what: str) -> str:
    """Writes a number of things.

    >>> counted(1, "sample"), counted(0, "sample")
    ('1 sample', '0 samples')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def shown(result: Any) -> str:
    """Writes the shape and dtype of a result.

    >>> shown(torch.zeros(2, 3)), shown({"weight": torch.zeros(3)})
    ('(2, 3) float32', "{'weight': (3,) float32}")
    """
    if isinstance(result, Tensor):
        return f"{tuple(result.shape)} {str(result.dtype).removeprefix('torch.')}"
    if isinstance(result, Mapping):
        some = [f"{name!r}: {shown(t)}" for name, t in [*result.items()][:_SHOWN]]
        more = [f"and {len(result) - _SHOWN} more"] if len(result) > _SHOWN else []
        return "{" + ", ".join([*some, *more]) + "}"
    return f"{result:.4g}" if isinstance(result, float) else repr(result)


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
    found: Mapping[str, Tensor], batch: Batch, *, are_real: bool = False, of_shards: bool = False
) -> dict[str, Tensor]:
    """Returns a value for every parameter, in order; zeros for those that the loss does not reach.

    With `are_real`, values of complex parameters are real, as squares are. With `of_shards`, those of
    tensor-parallel parameters are of this rank's shard, and become DTensors.
    """
    values = dict(found)
    for name, p in batch.parameters.items():
        if name not in found:
            dtype = wide(p.dtype).to_real() if are_real else wide(p.dtype)
            values[name] = batch.stored(batch.zeros(name, dtype, of_shard=of_shards))
    if of_shards:
        return {name: batch.spread.wrapped(name, values[name]) for name in batch.parameters}
    return {name: values[name] for name in batch.parameters}
