"""Reductions of many parameters: on a GPU, those that one launch can do wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from pergrad.factors import Factor
from pergrad.reductions.gradients import SampleGradients
from pergrad.reductions.norms import Launch, squared_norms_in_one_launch
from pergrad.reductions.sums import weighted_sums_in_one_launch

__all__ = ["SquaredNorms", "weighted_sums"]


class SquaredNorms:
    """|G_n|², (n,) in float64, of one parameter after another; `found()` has them all.

    What waits is held: never more than the bound of memory that its gradients have.
    """

    def __init__(self) -> None:
        # With their factors as they are now: another quantity may turn them into gradients meanwhile.
        self._waiting: dict[Launch, list[tuple[str, SampleGradients, Factor]]] = defaultdict(list)
        self._held: dict[Launch, int] = defaultdict(int)  # bytes
        self._found: dict[str, Tensor] = {}

    def add(self, name: str, gradients: SampleGradients) -> None:
        launch = gradients.launch
        if launch is None:
            self._found[name] = gradients.squared_norms()
            return
        factor = gradients.factors[0]
        self._waiting[launch].append((name, gradients, factor))
        self._held[launch] += factor.size * factor.dtype.itemsize
        if self._held[launch] >= gradients.bound:
            self._launch(launch)

    def found(self) -> dict[str, Tensor]:
        """Those of all that were added, by name."""
        for launch in list(self._waiting):
            self._launch(launch)
        return self._found

    def _launch(self, launch: Launch) -> None:
        waiting = self._waiting.pop(launch)
        del self._held[launch]
        found = squared_norms_in_one_launch(launch, [f for _, _, f in waiting])
        for (name, gradients, _), squares in zip(waiting, found.unbind(), strict=True):
            self._found[name] = gradients.with_squared_norms(squares)


def weighted_sums(
    many: dict[str, SampleGradients], weights: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """(name, Σ_n weights[n] G_n) of every parameter of one recording, each let go of when it is done."""
    together: dict[torch.dtype, dict[str, SampleGradients]] = defaultdict(dict)
    for name in [name for name, gradients in many.items() if gradients.can_be_summed_in_company]:
        gradients = many.pop(name)
        together[gradients.dtype][name] = gradients
    while together:
        _, some = together.popitem()
        factors = [gradients.factors[0] for gradients in some.values()]
        scaled = next(iter(some.values())).scaled_weights(
            weights
        )  # of one recording: the same for all
        yield from zip(some, weighted_sums_in_one_launch(factors, scaled), strict=True)
    while many:
        name, gradients = many.popitem()
        yield name, gradients.weighted_sum(weights)
