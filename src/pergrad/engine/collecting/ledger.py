"""Collects the factors of each parameter and reduces them as soon as the last one has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pergrad.engine.collecting.uses import UseCounter
from pergrad.errors import ScopeError
from pergrad.factors import Factor
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients, default_bound
from pergrad.runtime import is_traced, without_autocast
from pergrad.runtime.queue import Queue

__all__ = ["Ledger", "Sink", "queue_for"]


class Sink(Protocol):
    """Where the factors of a recording go."""

    passes: int  # how often the engine runs a backward pass that the user asks for once
    queue: Queue

    def expects(self, name: str) -> bool: ...

    def add(self, name: str, factor: Factor) -> None: ...


def queue_for(parameters: Sequence[Tensor], max_bytes: int | None) -> Queue:
    """Makes the queue of one recording: what is deferred depends on where the parameters are.

    A trace runs rules at once: its order of operations is the order in which a compiled step frees memory.
    """
    device = parameters[0].device if parameters else torch.device("cpu")
    traced = bool(parameters) and is_traced(parameters[0])
    defers_rules = _is_bound_by_python(device) and not traced
    bound = default_bound(device, waits=defers_rules) if max_bytes is None else max_bytes
    return Queue(bound, device, defers_rules=defers_rules)


def _is_bound_by_python(device: torch.device) -> bool:
    """Whether the speed of a step on this device is bound by Python."""
    return device.type == "cuda"


class Ledger:
    """The sink of a recording: holds the factors of each parameter and feeds the quantities."""

    def __init__(
        self,
        quantities: Sequence[Quantity],
        batch: Batch,
        scale: Tensor | float = 1.0,
    ) -> None:
        self.uses = UseCounter()
        self.queue = batch.queue
        self.is_paused = False  # gradients that arrive belong to another backward pass
        self._quantities = sorted(quantities, key=_priority)
        self.passes = max([q.passes for q in quantities])
        # For each sample: what a mean loss has divided by, and the user's weight.
        self._scale = scale
        self._batch = batch
        self._pass = 0
        self._reduced: set[str] = set()
        self._factors: dict[str, list[Factor]] = {}
        self._is_open = False

    @property
    def is_empty(self) -> bool:
        return not self.uses.arrived and not self.queue

    def open(self) -> None:
        """Begins to take factors."""
        self._pass = 0
        self._is_open = True
        for quantity in self._quantities:
            quantity.begin(self._batch)

    def add(self, name: str, factor: Factor) -> None:
        """Takes one factor; reduces the parameter if it was the last. Called outside of autocast."""
        if self.expects(name):
            self._factors.setdefault(name, []).append(factor)
            if self.uses.arrive(name):
                self._reduce(name)

    def expects(self, name: str) -> bool:
        """Whether a gradient that arrives now belongs here; raises an error when the block is over."""
        if self.is_paused:
            return False
        if not self._is_open:
            raise ScopeError(
                f"a gradient of parameter {name!r} arrived outside of its scope: call backward() "
                "inside the `record` block; with call_for_per_sample_grads, start from the tensors "
                "that the call returned"
            )
        return True

    def _reduce(self, name: str) -> None:
        gradients = SampleGradients(self._factors.pop(name), self._scale, bound=self.queue.bound)
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
        """Reduces what only a reentrant checkpoint uses, whose own backward pass is over."""
        self.queue.drain()
        self._reduce_those([name for name in self._factors if self.uses.is_recomputed_once(name)])

    def end_pass(self) -> None:
        """Ends a backward pass that is not the last."""
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
        """Reduces what is left: uses that the loss did not reach never arrive."""
        self.queue.drain()
        self._reduce_those(list(self._factors))
        self.queue.drain()

    def _reduce_those(self, names: Sequence[str]) -> None:
        if names:
            with without_autocast(self._batch.device):
                for name in names:
                    self._reduce(name)

    def close(self) -> None:
        """Reduces what is left and ends the quantities."""
        try:
            self._reduce_all()
            self._is_open = False
            with without_autocast(self._batch.device):
                for quantity in self._quantities:
                    quantity.end()
                    if not self._batch.is_traced:
                        quantity.settle()
        except BaseException:
            self.abandon()
            raise
        self._forget()

    def abandon(self) -> None:
        """Drops everything, after an error."""
        self._forget()
        self._is_open = False
        for quantity in self._quantities:
            quantity.abandon()

    def _forget(self) -> None:
        self.queue.clear()
        self.uses.arrived.clear()
        self._factors.clear()
        self._reduced.clear()


def _priority(quantity: Quantity) -> int:
    return quantity.priority
