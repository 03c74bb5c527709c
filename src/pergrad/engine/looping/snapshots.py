"""Repeats a run as it was: keeps the random state and the buffers that it began with."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.recording.modules import buffers_in

__all__ = ["Snapshot", "random_state", "undisturbed"]


def random_state() -> list[Tensor]:
    """Returns torch's random state, on the CPU and on every GPU that is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # only where a GPU is available
        states += torch.cuda.get_rng_state_all()
    return states


class Snapshot:
    """Holds the random state and the buffers of a module, to run it again from there."""

    def __init__(self, module: nn.Module) -> None:
        self._states = random_state()
        self._python = random.getstate()
        numpy_random = _numpy_random()
        self._numpy = None if numpy_random is None else numpy_random.get_state()
        self._buffers = [(b, b.detach().clone()) for b in buffers_in(module)]

    def draws_as(self, other: Snapshot) -> bool:
        """Whether both have the same random state: what ran between them drew no random numbers."""
        return (
            all(map(torch.equal, self._states, other._states))
            and self._python == other._python
            and _is_same_state(self._numpy, other._numpy)
        )

    def restore(self) -> None:
        """Sets random state and buffers to what they were."""
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state_all(self._states[1:])
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)
        if self._buffers:
            with torch.no_grad():
                for buffer, saved in self._buffers:
                    buffer.copy_(saved)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[Snapshot]:
    """Restores the random state and the module's buffers at the end."""
    snapshot = Snapshot(module)
    try:
        yield snapshot
    finally:
        snapshot.restore()


def _numpy_random() -> Any:
    """Returns numpy's random module where numpy is loaded; pergrad itself needs torch alone.

    This loads it, so that the numbers that a step draws first can be drawn again.
    """
    return getattr(sys.modules.get("numpy"), "random", None)


def _is_same_state(a: Any, b: Any) -> bool:
    """Compares two of numpy's random states: tuples with an array among their entries."""
    if a is None or b is None:
        return True  # numpy was not loaded at the time
    return all(
        bool((x == y).all() if hasattr(x, "all") else x == y) for x, y in zip(a, b, strict=True)
    )
