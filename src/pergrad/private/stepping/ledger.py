"""Writes what a run has released, one line of JSON for each step, before the step is made."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pergrad.errors import PrivacyError

if sys.platform != "win32":
    import fcntl

__all__ = ["SEAL_DIFFERS", "Ledger", "read_ledger"]

_FORMAT = 1
SEAL_DIFFERS = (
    "step {number} was released before from another sum of gradients or with other settings of the "
    "optimizer, and both releases count: make the run deterministic "
    "(torch.use_deterministic_algorithms) and restore its scheduler, or call step.renew_noise() to go on "
    "with new batches and noise; these steps stay counted"
)


class Ledger:
    """A file whose first line is the plan, and whose further lines are the steps that were released.

    A line is on the disk before the model changes. A line that was cut off by a crash belongs to a step
    that was not made, and is removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.head: dict[str, Any] | None = None
        self.seals: list[str] = []  # of the steps, in order
        self._size = 0  # bytes of these lines
        if not self.path.parent.is_dir() or (self.path.exists() and not self.path.is_file()):
            raise PrivacyError(
                f"the ledger {self.path} cannot be a file there: make its folder, or choose another path"
            )
        if self.path.exists():
            try:
                self.head, self.seals, self._size = _read(self.path)
                if self._size < self.path.stat().st_size:
                    self._cut()
            except OSError as error:
                raise self._unwritten(error) from error

    def begin(self, head: Mapping[str, Any]) -> None:
        """Writes the first line, or checks that the file is the ledger of this run."""
        head = {"ledger": _FORMAT, **head}
        if self.head is None:
            self._append(head)
            self.head = head
            return
        told = json.loads(json.dumps(head))
        differing = sorted(
            name  # as text: the order of bounds by patterns counts
            for name in {*told, *self.head}
            if json.dumps(told.get(name)) != json.dumps(self.head.get(name))
        )
        if differing:
            raise PrivacyError(
                f"{self.path} is the ledger of another run: it differs in {', '.join(differing)}; give this "
                "run a file of its own, or load the state of the run that the ledger belongs to"
            )

    def write(self, number: int, seal: str) -> None:
        """Writes the line of a step; a step that is made again must release what it released before."""
        if number < len(self.seals):
            if self.seals[number] != seal:
                raise PrivacyError(SEAL_DIFFERS.format(number=number))
            return
        if number > len(self.seals):
            raise PrivacyError(
                f"{self.path} ends at step {len(self.seals)}, but the run is at step {number}: this is not "
                "its ledger, or lines are missing"
            )
        self._append({"step": number + 1, "seal": seal})
        self.seals.append(seal)

    def _append(self, line: Mapping[str, Any]) -> None:
        is_new = not self.path.exists()
        told = json.dumps(line).encode() + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                self._lock(file)
                if os.fstat(file.fileno()).st_size != self._size:
                    raise PrivacyError(
                        f"another run has written to the ledger {self.path}, or it was edited: give each run "
                        "a ledger of its own, and resume a run in one process only"
                    )
                if file.write(told) != len(told):
                    raise OSError("no space left")
                os.fsync(file.fileno())
            if is_new:  # the file's name must be on the disk too
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            if self.path.exists() and self.path.stat().st_size > self._size:
                self._cut()
            raise self._unwritten(error) from error
        self._size += len(told)

    @staticmethod
    def _lock(file: IO[bytes]) -> None:
        """Keeps other processes from writing until the file is closed."""
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)

    def _cut(self) -> None:
        """Removes what lies behind the complete lines."""
        with self.path.open("r+b") as file:
            file.truncate(self._size)
            os.fsync(file.fileno())

    def _unwritten(self, error: OSError) -> PrivacyError:
        return PrivacyError(
            f"the ledger {self.path} cannot be written ({error.strerror or error}), so the step is not made: "
            "free space or permit writing, and make the step again"
        )


def read_ledger(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """Returns the first line of a ledger, and the number of steps that were released."""
    head, seals, _ = _read(Path(path))
    if head is None:
        raise PrivacyError(f"{path} is empty: no run has begun to write it")
    return head, len(seals)


def _read(path: Path) -> tuple[dict[str, Any] | None, list[str], int]:
    """Returns head, seals, and the bytes of the complete lines."""
    head: dict[str, Any] | None = None
    seals: list[str] = []
    whole = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
        if not line.endswith(b"\n"):
            break
        try:
            entry = json.loads(line)
            if number == 0:
                if entry["ledger"] != _FORMAT:
                    raise ValueError
                head = entry
            else:
                if entry["step"] != number:
                    raise ValueError
                seals.append(entry["seal"])
        except (ValueError, KeyError, TypeError):
            raise PrivacyError(
                f"{path} is not a ledger: line {number + 1} is {line[:80]!r}"
            ) from None
        whole += len(line)
    return head, seals, whole
