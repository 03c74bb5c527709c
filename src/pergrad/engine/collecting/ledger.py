"""Collects the factors of each parameter and hands them on as soon as its last use has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from pergrad.engine.collecting.queue import Arrivals
from pergrad.errors import BatchSizeError, ScopeError
from pergrad.factors import Factor
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients, default_bound
from pergrad.runtime import is_traced, without_autocast

__all__ = ["Book", "GradSampleBook", "Ledger", "add_to_grad_sample", "check_batch_sizes"]


class Book(Protocol):
    """What a use of a weight tells: that it was seen, and later what it contributes."""

    passes: int  # backwards to run for one that is asked for
    waits: bool  # whether gradients of which nothing flows on are to come by `later`

    def expect(self, name: str) -> None: ...

    def expect_in_recomputation(self, name: str) -> None: ...

    def add(self, name: str, factor: Factor) -> None: ...

    def later(self, name: str, take_in: Callable[[], object], held: int) -> None: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def end_pass(self) -> None: ...

    def end_recomputation(self) -> None: ...

    def catch_up(self) -> None: ...


class Ledger:
    """Uses are counted in the forward; a parameter is reduced and freed when all have arrived."""

    def __init__(
        self,
        quantities: Sequence[Quantity],
        batch: Batch,
        scale: Tensor | float = 1.0,
        max_bytes: int | None = None,
    ) -> None:
        self._quantities = sorted(quantities, key=lambda q: q.priority)
        # Of each sample: what a mean loss has taken off, and the user's weights.
        self._scale = scale
        self._batch = batch
        self._is_traced = any(map(is_traced, batch.parameters.values()))
        # A trace has the order in which memory is freed first.
        self.waits = _is_waited_for(batch.device) and not self._is_traced
        if max_bytes is None:
            max_bytes = default_bound(batch.device, waits=self.waits)
        self._bound = max_bytes
        self._arrivals = Arrivals(self._bound)
        self.passes = max(q.passes for q in quantities)
        self._pass = 0
        self._uses: dict[str, int] = {}
        self._uses_to_recompute: dict[str, int] = {}
        self._arrived: dict[str, int] = {}
        self._reduced: set[str] = set()
        self._factors: dict[str, list[Factor]] = {}
        self._is_open = False
        self._is_paused = False

    def expect(self, name: str) -> None:
        # A use seen inside a backward is a checkpoint's recomputation: the first one was counted,
        # or, if it ran without gradients, its factor is reduced as it comes.
        if torch._C._current_graph_task_id() == -1:
            self._uses[name] = self._uses.get(name, 0) + 1

    def expect_in_recomputation(self, name: str) -> None:
        """A call without gradients: a reentrant checkpoint will repeat it in the backward, or nobody."""
        self._uses_to_recompute[name] = self._uses_to_recompute.get(name, 0) + 1

    @property
    def is_empty(self) -> bool:
        return not self._arrived and self._arrivals.are_none

    def open(self) -> None:
        self._pass = 0
        self._forget()
        self._is_open = True
        for quantity in self._quantities:
            quantity.begin(self._batch)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, gradients pass by: they belong to somebody else's backward."""
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def add(self, name: str, factor: Factor) -> None:
        """Take in a factor, outside of autocast."""
        if not self._expects(name):
            return
        self._factors.setdefault(name, []).append(factor)
        arrived = self._arrived[name] = self._arrived.get(name, 0) + 1
        if arrived >= self._uses.get(name, 0) and name not in self._uses_to_recompute:
            self._reduce(name)

    def later(self, name: str, take_in: Callable[[], object], held: int) -> None:
        """A gradient has come: `take_in` adds the factor, and holds so many bytes until then."""
        if self._expects(name):
            self._arrivals.add(take_in, held)
            if self._arrivals.are_too_many:
                self.catch_up()

    def _expects(self, name: str) -> bool:
        """Whether gradients are taken in; they may come from somebody else's backward."""
        if self._is_paused:
            return False
        if not self._is_open:
            raise ScopeError(
                f"a gradient of parameter {name!r} arrived outside of its scope: call backward() "
                "inside the `record` block; with call_for_per_sample_grads, start from the tensors "
                "that the call returned"
            )
        return True

    def _reduce(self, name: str) -> None:
        gradients = SampleGradients(self._factors.pop(name), self._scale, bound=self._bound)
        for quantity in self._quantities:
            if self._pass < self.passes - quantity.passes:
                continue
            if name in self._reduced and not quantity.is_linear:
                raise ScopeError(
                    f"a second backward in the `record` block adds to parameter {name!r}, after "
                    f"{type(quantity).__name__} was computed from the first: add the losses up and call "
                    "backward() once, or use a block for each"
                )
            quantity.consume(name, gradients)
        self._reduced.add(name)

    def end_recomputation(self) -> None:
        """A reentrant checkpoint's own backward is over: what only it uses is complete."""
        self._arrivals.take_in()
        with without_autocast(self._batch.device):
            for name in list(self._factors):
                if self._uses_to_recompute.get(name) == 1 and name not in self._uses:
                    self._reduce(name)

    def catch_up(self) -> None:
        """Take in all that waits, and let go of it: after a backward the caller may write over it."""
        self._arrivals.take_in()
        with without_autocast(self._batch.device):
            for quantity in self._quantities:
                quantity.catch_up()

    def end_pass(self) -> None:
        """A backward that is not the last is over."""
        if self._pass == self.passes - 1:
            raise ScopeError(
                f"a second backward in the `record` block, of which each is run {self.passes} times: add "
                'the losses up and call backward() once, or use memory="kept"'
            )
        self._reduce_all()
        for quantity in self._quantities:
            if self._pass >= self.passes - quantity.passes:
                quantity.end_pass()
        self._pass += 1
        self._forget()

    def _reduce_all(self) -> None:
        """Reduce what is left: uses that the loss did not reach never arrive."""
        self._arrivals.take_in()
        with without_autocast(self._batch.device):
            for name in list(self._factors):
                self._reduce(name)

    def close(self) -> None:
        """Reduce what is left and end the quantities."""
        try:
            self._reduce_all()
            self._is_open = False
            with without_autocast(self._batch.device):
                self._end()
        except BaseException:
            self.abandon()
            raise

    def _end(self) -> None:
        for quantity in self._quantities:
            quantity.end()
            if not self._is_traced:
                quantity.settle()

    def abandon(self) -> None:
        """Forget everything, after an error."""
        self._forget()
        self._is_open = False
        for quantity in self._quantities:
            quantity.abandon()

    def _forget(self) -> None:
        self._arrivals.clear()
        self._arrived.clear()
        self._factors.clear()
        self._reduced.clear()


def _is_waited_for(device: torch.device) -> bool:
    """Whether it is Python that a step waits for there."""
    return device.type == "cuda"


class GradSampleBook:
    """Adds every factor to the `grad_sample` of its weight as it arrives: for `ExpandedWeight`."""

    passes = 1
    waits = False

    def __init__(self, weights: dict[str, Tensor], scale: int) -> None:
        self._weights = weights
        self._scale = scale

    def expect(self, name: str) -> None:
        pass

    def expect_in_recomputation(self, name: str) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def end_recomputation(self) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def later(self, name: str, take_in: Callable[[], object], held: int) -> None:
        take_in()

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, name: str, factor: Factor) -> None:
        gradients = factor.materialize()
        add_to_grad_sample(
            self._weights[name], gradients if self._scale == 1 else gradients * self._scale
        )


def check_batch_sizes(earlier: Tensor | None, grads: Tensor) -> None:
    """Refuse to add the gradients of batches of different sizes: their samples have nothing in common."""
    if earlier is not None and earlier.shape != grads.shape:
        raise BatchSizeError(
            f"a batch of {len(grads)} samples cannot add to the grad_sample of an earlier one of "
            f"{len(earlier)}: set grad_sample to None between them"
        )


def add_to_grad_sample(weight: Tensor, grads: Tensor) -> None:
    """weight.grad_sample += grads, in the weight's dtype."""
    grads = grads.to(weight.dtype)
    earlier: Tensor | None = getattr(weight, "grad_sample", None)
    check_batch_sizes(earlier, grads)
    weight.grad_sample = grads if earlier is None else earlier + grads  # type: ignore[attr-defined]
