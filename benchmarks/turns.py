"""Several runs on one machine: they prepare side by side, and are timed one after the other.

Compiling takes minutes on one core each, and timing must have the machine for itself. A run that prepares
holds a share of a lock on a file; a run that times holds all of it, which it gets once nobody prepares.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """The lock of one run; without a path, the run is alone and never waits."""

    path: Path | None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, lock: int) -> Iterator[None]:
        if self.path is None:
            yield
            return
        with self.path.open("a") as file:  # closing it lets go of the lock
            fcntl.flock(file, lock)
            yield
