"""Counts the uses of each parameter, so that its gradients can be reduced when the last one arrives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

__all__ = ["UseCounter"]


class _Counted(Protocol):
    """A weight, as the counter sees it."""

    @property
    def counted(self) -> tuple[str, ...]:
        """The parameters that a use of it counts for."""


class UseCounter:
    """The number of uses of each parameter that the forward pass has made and the backward pass owes."""

    def __init__(self) -> None:
        self._expected: dict[str, int] = {}
        self._to_recompute: dict[str, int] = {}
        self.arrived: dict[str, int] = {}

    def expect(self, weights: Iterable[_Counted]) -> None:
        """Counts one use of each weight.

        A use inside of a backward pass is a checkpoint's recomputation. Its first run was counted already,
        or ran without gradients: then its factor is reduced as it arrives.
        """
        if torch._C._current_graph_task_id() == -1:
            expected = self._expected
            for weight in weights:
                for name in weight.counted:
                    expected[name] = expected.get(name, 0) + 1

    def expect_in_recomputation(self, names: Iterable[str]) -> None:
        """Counts a use without gradients, which only a reentrant checkpoint repeats in the backward pass."""
        for name in names:
            self._to_recompute[name] = self._to_recompute.get(name, 0) + 1

    def arrive(self, name: str) -> bool:
        """Counts a factor that has arrived; returns whether it is the last one."""
        arrived = self.arrived[name] = self.arrived.get(name, 0) + 1
        return arrived >= self._expected.get(name, 0) and name not in self._to_recompute

    def is_recomputed_once(self, name: str) -> bool:
        """Whether one reentrant checkpoint holds the only use."""
        return self._to_recompute.get(name) == 1 and name not in self._expected
