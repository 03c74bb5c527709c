"""Collects the factors of each parameter and hands them on as soon as its last use has arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from pergrad.errors import BatchSizeError, ScopeError
from pergrad.factors import Factor
from pergrad.quantities import Batch, Quantity

__all__ = ["Book", "GradSampleBook", "Ledger", "add_to_grad_sample", "check_batch_sizes"]


class Book(Protocol):
    """What a use of a weight tells: that it was seen, and later what it contributes."""

    def expect(self, name: str) -> None: ...

    def add(self, name: str, factor: Factor) -> None: ...

    def paused(self) -> AbstractContextManager[None]: ...


class Ledger:
    """Uses are counted in the forward; a parameter is reduced and freed when all have arrived."""

    def __init__(self, quantities: Sequence[Quantity], batch: Batch, scale: int) -> None:
        self._quantities = quantities
        self._scale = scale  # what a loss that is a mean over the samples has taken off
        self._batch = batch
        self._uses: Counter[str] = Counter()
        self._arrived: Counter[str] = Counter()
        self._factors: dict[str, list[Factor]] = {}
        self._is_open = False
        self._is_paused = False

    def expect(self, name: str) -> None:
        # A use seen inside a backward is a checkpoint's recomputation: the first one was counted,
        # or, if it ran without gradients, its factor is reduced as it comes.
        if torch._C._current_graph_task_id() == -1:
            self._uses[name] += 1

    @property
    def is_empty(self) -> bool:
        return not self._arrived

    def open(self) -> None:
        self._arrived.clear()
        self._factors.clear()
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
        if self._is_paused:
            return
        if not self._is_open:
            raise ScopeError(
                f"a gradient of parameter {name!r} arrived outside of its scope: call backward() "
                "inside the `record` block; with call_for_per_sample_grads, start from the tensors "
                "that the call returned"
            )
        factor = factor if self._scale == 1 else factor.scaled(self._scale)
        self._factors.setdefault(name, []).append(factor)
        self._arrived[name] += 1
        if self._arrived[name] >= self._uses[name]:
            self._reduce(name)

    def _reduce(self, name: str) -> None:
        factors = self._factors.pop(name)
        for quantity in self._quantities:
            quantity.consume(name, factors)

    def close(self) -> None:
        """Reduce what is left (uses that the loss did not reach never arrive) and end the quantities."""
        for name in list(self._factors):
            self._reduce(name)
        self._is_open = False
        for quantity in self._quantities:
            quantity.end()

    def abandon(self) -> None:
        """Forget everything, after an error."""
        self._factors.clear()
        self._is_open = False


class GradSampleBook:
    """Adds every factor to the `grad_sample` of its weight as it arrives: for `ExpandedWeight`."""

    def __init__(self, weights: dict[str, Tensor], scale: int) -> None:
        self._weights = weights
        self._scale = scale

    def expect(self, name: str) -> None:
        pass

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, name: str, factor: Factor) -> None:
        factor = factor if self._scale == 1 else factor.scaled(self._scale)
        add_to_grad_sample(self._weights[name], factor.materialize())


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
