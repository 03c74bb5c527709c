"""Batches reductions of many parameters into few kernel launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pergrad.factors import Factor
from pergrad.reductions.gradients import SampleGradients, scaled_squares
from pergrad.reductions.norms import (
    Launch,
    norms_of_small,
    squared_norms_in_one_launch,
    sums_in_one_launch,
)
from pergrad.reductions.sums import weighted_sums_in_one_launch
from pergrad.reductions.weights import SampleWeights
from pergrad.runtime.queue import Queue

__all__ = ["SquaredNorms", "weighted_sums"]


class SquaredNorms:
    """|G_n|², (n,) in float64, of parameters that are added one after another.

    Batches the computations of parameters that can share a kernel launch: they go to `queue`, which holds no
    more bytes than its bound. Small gradients on a CPU are kept until one call computes the norms of all of
    one shape. With `keeps_factors`, gradients replace factors that stay alive for a later sum, where they are
    smaller, or, with `as_gradients`, faster to sum; a launch that computes them anyway provides them.
    """

    def __init__(
        self, queue: Queue, *, keeps_factors: bool = False, as_gradients: bool = False
    ) -> None:
        self._queue = queue
        self._keeps_factors = keeps_factors
        self._as_gradients = as_gradients
        self._batches: dict[_Key, _Batch] = {}
        self._names: list[str] = []
        self._found: list[Tensor] = []  # (some of the names, n)
        self._alone: dict[str, Tensor] = {}  # (n,)
        self._small: dict[float, _Small] = {}  # by the number of the scale
        self._last: _Batch | None = None  # the batch that was added to last, unless it was launched

    def add(self, name: str, gradients: SampleGradients) -> None:
        shared = gradients.launch if self._keeps_factors else gradients.small_or_launch
        if isinstance(shared, Tensor):
            self._add_small(name, shared, gradients.scale)
            return
        if self._keeps_factors and not (shared and _finds_gradients(shared[0])):
            gradients.compact(at_any_size=self._as_gradients)
            shared = gradients.launch
        if shared is None:
            self._alone[name] = gradients.squared_norms()
            return
        launch, tensors = shared
        key = (launch, _number(gradients.scale))
        if self._joins_the_last(name, gradients, tensors, key):
            return
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(*key, gradients.scale)
            self._queue.put(partial(self._launch, key))
        batch.names.append(name)
        batch.tensors.append(tensors)
        if self._keeps_factors:
            batch.kept.append((gradients, gradients.factors[0]))
        held = sum([t.nbytes for t in tensors])
        batch.bytes += held
        self._last = batch
        self._queue.hold(held)

    def _add_small(self, name: str, found: Tensor, scale: Tensor | float) -> None:
        number = _number(scale)
        small = self._small.get(number)
        if small is None:
            small = self._small[number] = _Small(scale)
        elements = found.numel()
        if elements > _COPIED:
            small.names.append(name)
            small.norms.append(norms_of_small([found]))
            return
        key = found.shape, found.dtype
        group = small.by_shape.get(key)
        if group is None:
            group = small.by_shape[key] = [], []
        group[0].append(name)
        group[1].append(found)
        small.elements += elements
        if small.elements > min(_KEPT, self._queue.bound // 32):
            self._end_small()

    def _end_small(self) -> None:
        for small in self._small.values():
            self._names += small.names
            found = small.norms
            for names, each in small.by_shape.values():
                self._names += names
                found.append(norms_of_small(each))
            squares = (found[0] if len(found) == 1 else torch.cat(found)).double().square()
            self._found.append(scaled_squares(squares, small.scale))
        self._small.clear()

    def _joins_the_last(
        self,
        name: str,
        gradients: SampleGradients,
        tensors: tuple[Tensor, ...],
        key: _Key,
    ) -> bool:
        """Adds a sum over positions to the last problem if both read the same output gradients.

        The shift of a layer norm does so with its scale. Inner products read them too, and add up to norms of
        sums; but the sums of key biases in attention always cancel and would have to be computed again.
        """
        last = self._last
        if last is None or len(tensors) > 1 or last.scale_number != key[1]:
            return False
        if last.launch.kernel != "column_squared_norms":
            return False
        g, *others = last.tensors[-1]
        number = len(last.tensors) - 1
        if g is not tensors[0] or not others or number in last.summed:
            return False
        last.summed[number] = name
        if self._keeps_factors:
            last.kept_sums.append((gradients, gradients.factors[0]))
        return True

    def found(self) -> tuple[list[str], Tensor | None]:
        """Returns the names of all that were added, and their squared norms, (names, n)."""
        for key in list(self._batches):
            self._launch(key)
        self._end_small()
        if self._alone:
            self._names += self._alone
            self._found.append(torch.stack(list(self._alone.values())))
            self._alone.clear()
        if len(self._found) > 1:
            self._found = [torch.cat(self._found)]
        return self._names, next(iter(self._found), None)

    def _launch(self, key: _Key) -> None:
        batch = self._batches.pop(key, None)
        if batch is None:  # `found` was called before the queue was drained
            return
        self._queue.release(batch.bytes)
        self._last = None
        numbers = list(batch.summed)
        if self._keeps_factors and _finds_gradients(batch.launch):
            sums, found = sums_in_one_launch(batch.tensors, numbers)
            kept = (*batch.kept, *batch.kept_sums)
            for (gradients, factor), total in zip(kept, sums, strict=True):
                gradients.settle(factor, total)
        else:
            found = squared_norms_in_one_launch(batch.launch, batch.tensors, numbers)
        self._names += [*batch.names, *batch.summed.values()]
        self._found.append(scaled_squares(found, batch.scale))


_Key = tuple[Launch, float]  # the launch and the number of the scale


_COPIED = 2**12  # elements: copying more of them takes longer than another call of torch
_KEPT = 2**16  # elements of small gradients: they fit into a core's cache


@dataclass(slots=True)
class _Small:
    """Holds small gradients by shape and dtype, with their names, and norms that are known, (1, n) each."""

    scale: Tensor | float
    names: list[str] = field(default_factory=list)  # of the norms
    norms: list[Tensor] = field(default_factory=list)
    by_shape: dict[tuple[torch.Size, torch.dtype], tuple[list[str], list[Tensor]]] = field(
        default_factory=dict
    )
    elements: int = 0


@dataclass(slots=True)
class _Batch:
    """Holds the parameters of one launch and the tensors that it reads.

    The tensors are held here, since a `SampleGradients` may replace its factors before the launch.
    """

    launch: Launch
    scale_number: float
    scale: Tensor | float  # shared by all of them
    names: list[str] = field(default_factory=list)
    tensors: list[tuple[Tensor, ...]] = field(default_factory=list)
    summed: dict[int, str] = field(
        default_factory=dict
    )  # by number: the parameter that is the sum of its g
    kept: list[tuple[SampleGradients, Factor]] = field(default_factory=list)
    kept_sums: list[tuple[SampleGradients, Factor]] = field(default_factory=list)
    bytes: int = 0


def _finds_gradients(launch: Launch) -> bool:
    """Whether the launch computes the gradients too, at no extra cost."""
    return launch.kernel == "column_squared_norms"


def weighted_sums(
    many: dict[str, SampleGradients], weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, Σ_n weights[n] G_n) of every parameter and removes each from `many`."""
    given = SampleWeights(weights.double())
    together: dict[Any, dict[str, SampleGradients]] = defaultdict(dict)
    for name in [name for name, gradients in many.items() if gradients.shares_a_launch_of_sums]:
        gradients = many.pop(name)
        kind = type(gradients.factors[0])
        together[kind, gradients.dtype, _number(gradients.scale)][name] = gradients
    while together:
        _, some = together.popitem()
        factors = [gradients.factors[0] for gradients in some.values()]
        first = next(iter(some.values()))  # scale and bound are the same for all
        scaled = first.scaled_weights(given).values
        sums = weighted_sums_in_one_launch(factors, scaled, first.bound)
        yield from zip(some, sums, strict=True)
    while many:
        name, gradients = many.popitem()
        yield name, gradients.weighted_sum(given)


def _number(scale: Tensor | float) -> float:
    """Returns a number that is equal for equal scales."""
    return id(scale) if isinstance(scale, Tensor) else scale
