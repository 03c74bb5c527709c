"""Manages the results folder: identifies its audit, checks whether it may resume, and locks it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pergrad.audit.streaming.files import is_unfinished, made_folder, write_whole
from pergrad.errors import AuditError

if sys.platform != "win32":
    import fcntl

__all__ = ["ResultsFolder"]

_FORMAT = 3  # formats 1 and 2 had other sketches
_KIND = "an audit by pergrad"
_BATCH_SIZE = "batch_size-"
_INDEX = "index"  # the folder that keep_index leaves
_FALLBACK = "fallback"  # a file with the reason


class ResultsFolder:
    """The folder of one audit.

    `audit.json` identifies the model, data and options; `chunks` holds the rows computed so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.chunks = path / "chunks"
        self._about = path / "audit.json"

    @property
    def is_finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against other audits within the block."""
        if sys.platform == "win32":  # no lock: two audits in one folder are not detected
            yield
            return
        with self._lock_file() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AuditError(
                    f"another audit is writing into {self.path}: wait for it, or choose another folder"
                ) from error
            except OSError:  # a file system without locks, such as some network ones
                pass
            yield

    def _lock_file(self) -> IO[str]:
        return (self.path / ".lock").open("w")

    def open(self) -> dict[str, Any] | None:
        """Returns the contents of `audit.json`, or None if the folder is new.

        Refuses a folder that holds anything else or cannot be read, and leaves it unchanged.
        """
        made_folder(self.path)
        if not self._about.exists():
            found = [p for p in self.path.iterdir() if not is_unfinished(p)]
            others = sorted(p.name for p in found if p.name != ".lock")
            if others:
                raise AuditError(
                    f"the results folder {self.path} is not empty and holds no audit "
                    f"({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}): choose another one"
                )
            return None
        return self._read()

    def _read(self) -> dict[str, Any]:
        try:
            about = json.loads(self._about.read_text())
            if about["kind"] != _KIND:
                raise AuditError(
                    f"{self._about} was not written by an audit: choose another results folder"
                )
            if about["format"] != _FORMAT:
                raise AuditError(
                    f"{self._about} has format {about['format']}, written by pergrad "
                    f"{about.get('pergrad')}; this version reads {_FORMAT}: choose another results folder"
                )
            about["identity"], about["batch_size"]  # raises if one is missing
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AuditError(
                f"{self._about} is corrupt ({type(error).__name__}: {error}): choose another results "
                "folder, or remove this one"
            ) from error
        return dict(about)

    def begin(self, about: dict[str, Any]) -> None:
        """Writes `audit.json`, which ties the folder to this audit."""
        self.chunks.mkdir(exist_ok=True)
        content = {"kind": _KIND, "format": _FORMAT, **about}
        write_whole(self._about, (json.dumps(content, indent=2) + "\n").encode())

    def clear(self) -> None:
        """Removes the rows, results and index of an audit; files that no audit has written are left."""
        if self.open() is None:
            return
        for path in (*self.chunks.glob("*"), *self.path.glob("*.parquet")):
            path.unlink()
        if self.chunks.is_dir():
            self.chunks.rmdir()
        if (self.path / _INDEX / f"{_INDEX}.json").exists():
            shutil.rmtree(self.path / _INDEX)
        for name in ("summary.json", "report.html", "audit.json"):
            (self.path / name).unlink(missing_ok=True)

    def refuse_another(self, about: dict[str, Any], identity: dict[str, Any]) -> None:
        """Refuses to resume with another model, data set, loss or options than the audit started with."""
        began = about["identity"]
        for key in {**began, **identity}:
            if began.get(key) != identity.get(key):
                raise AuditError(
                    f"the results folder {self.path} holds an audit with another {key.replace('_', ' ')} "
                    f"({began.get(key)}, now {identity.get(key)}): choose another folder, or "
                    "compute again with force=True (--force)"
                )

    def note_batch_size(self, size: int) -> None:
        """Stores that larger batches did not fit into memory, for a later resume."""
        write_whole(self.chunks / f"{_BATCH_SIZE}{size}", b"")

    def note_fallback(self, reason: str) -> None:
        """Stores why batches are computed sample by sample."""
        write_whole(self.chunks / _FALLBACK, reason.encode())

    @property
    def fallback(self) -> str | None:
        """Returns why batches were computed sample by sample; None if they were not."""
        path = self.chunks / _FALLBACK
        return path.read_text() if path.exists() else None

    def batch_size(self, about: dict[str, Any]) -> int:
        """Returns the batch size the audit started with, or the smallest it has shrunk to."""
        noted = [
            int(path.name.removeprefix(_BATCH_SIZE))
            for path in self.chunks.glob(f"{_BATCH_SIZE}*[0-9]")
        ]
        return min([int(about["batch_size"]), *noted])
