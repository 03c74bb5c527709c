"""Reductions of many parameters: on a GPU, those that one launch can do wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pergrad.factors import Factor
from pergrad.reductions.gradients import SampleGradients, scaled_squares
from pergrad.reductions.norms import Launch, squared_norms_in_one_launch, sums_in_one_launch
from pergrad.reductions.sums import weighted_sums_in_company

__all__ = ["SquaredNorms", "weighted_sums"]


class SquaredNorms:
    """|G_n|², (n,) in float64, of the parameters of one recording, which come one after another.

    What waits is held: never more than the bound of memory that its gradients have. Where the factors are to
    be `kept` for later, gradients take their place if they are smaller, or, `as_gradients`, if they are
    faster to sum up: those of one launch come from it.
    """

    def __init__(self, *, kept: bool = False, as_gradients: bool = False) -> None:
        self._kept = kept
        self._as_gradients = as_gradients
        self._waiting: dict[tuple[Launch, float], _Waiting] = {}  # by launch and scale
        self._names: list[str] = []
        self._found: list[Tensor] = []  # (some of the names, n)
        self._alone: dict[str, Tensor] = {}  # (n,)
        self._last: _Waiting | None = None  # where the last one waits, unless it was launched

    def add(self, name: str, gradients: SampleGradients) -> None:
        shared = gradients.launch
        if self._kept and not (shared and _finds_gradients(shared[0])):
            gradients.compact(at_any_size=self._as_gradients)
            shared = gradients.launch
        if shared is None:
            self._alone[name] = gradients.squared_norms()
            return
        launch, tensors = shared
        key = (launch, _number(gradients.scale))
        if self._joins_the_last(name, gradients, tensors, key):
            return
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(*key, gradients.scale)
        waiting.names.append(name)
        waiting.tensors.append(tensors)
        if self._kept:
            waiting.kept.append((gradients, gradients.factors[0]))
        for t in tensors:
            waiting.bytes += t.nbytes
        self._last = waiting
        if waiting.bytes >= gradients.bound:
            self._launch(key)

    def _joins_the_last(
        self,
        name: str,
        gradients: SampleGradients,
        tensors: tuple[Tensor, ...],
        key: tuple[Launch, float],
    ) -> bool:
        """Whether a sum over positions comes with the last one, as that of a shift with its scale's.

        That reads the same gradients of outputs. Inner products do too, and add up to the norms of sums; but
        those of the biases of keys in attention cancel, always, and would have to be computed again.
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
        if self._kept:
            last.kept_sums.append((gradients, gradients.factors[0]))
        return True

    def found(self) -> tuple[list[str], Tensor | None]:
        """The names of all that were added, and their squared norms, (names, n)."""
        self.launch()
        if self._alone:
            self._names += self._alone
            self._found.append(torch.stack(list(self._alone.values())))
            self._alone.clear()
        if len(self._found) > 1:
            self._found = [torch.cat(self._found)]
        return self._names, self._found[0] if self._found else None

    def launch(self) -> None:
        """Do all that waits."""
        for key in list(self._waiting):
            self._launch(key)

    def _launch(self, key: tuple[Launch, float]) -> None:
        waiting = self._waiting.pop(key)
        self._last = None
        numbers = list(waiting.summed)
        if self._kept and _finds_gradients(waiting.launch):
            sums, found = sums_in_one_launch(waiting.tensors, numbers)
            kept = (*waiting.kept, *waiting.kept_sums)
            for (gradients, factor), total in zip(kept, sums, strict=True):
                gradients.settle(factor, total)
        else:
            found = squared_norms_in_one_launch(waiting.launch, waiting.tensors, numbers)
        self._names += [*waiting.names, *waiting.summed.values()]
        self._found.append(scaled_squares(found, waiting.scale))


@dataclass(slots=True)
class _Waiting:
    """Parameters for one launch, and what it reads, as it was: factors may turn into gradients meanwhile."""

    launch: Launch
    scale_number: float
    scale: Tensor | float  # the same for all of them
    names: list[str] = field(default_factory=list)
    tensors: list[tuple[Tensor, ...]] = field(default_factory=list)
    summed: dict[int, str] = field(default_factory=dict)  # by number: the name of the sum of its g
    kept: list[tuple[SampleGradients, Factor]] = field(default_factory=list)
    kept_sums: list[tuple[SampleGradients, Factor]] = field(default_factory=list)
    bytes: int = 0


def _finds_gradients(launch: Launch) -> bool:
    """Whether it can give the gradients too.

    A compiler could sum them up as well, in the same time on the GPU, but in a launch for each.
    """
    return launch.kernel == "column_squared_norms"


def weighted_sums(
    many: dict[str, SampleGradients], weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """(name, Σ_n weights[n] G_n) of every parameter of one recording, each let go of when it is done."""
    together: dict[Any, dict[str, SampleGradients]] = defaultdict(dict)
    for name in [name for name, gradients in many.items() if gradients.is_summed_in_company]:
        gradients = many.pop(name)
        kind = type(gradients.factors[0])
        together[kind, gradients.dtype, _number(gradients.scale)][name] = gradients
    while together:
        _, some = together.popitem()
        factors = [gradients.factors[0] for gradients in some.values()]
        first = next(iter(some.values()))  # scale and bound are the same for all
        sums = weighted_sums_in_company(factors, first.scaled_weights(weights), first.bound)
        yield from zip(some, sums, strict=True)
    while many:
        name, gradients = many.popitem()
        yield name, gradients.weighted_sum(weights)


def _number(scale: Tensor | float) -> float:
    """The same number for the same scale."""
    return id(scale) if isinstance(scale, Tensor) else scale
