"""Coordinates several runs on one machine: they prepare in parallel and are timed one after the other.

Compiling takes minutes on one core per run, and timing needs the machine to itself. A preparing run holds a
shared lock on a file; a timing run holds an exclusive lock, which it gets once no run prepares.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Turns:
    """The lock of one run; without a path the run never waits."""

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
        with self.path.open("a") as file:  # closing the file releases the lock
            fcntl.flock(file, lock)
            yield
