"""Saves tensors and containers of them: a file is complete or as it was, and the same for the same values."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch

from pergrad.audit.streaming.files import replacing

__all__ = ["save_whole"]


def save_whole(value: Any, path: Path, *, durable: bool = True) -> None:
    """Writes `torch.save(value)` atomically; a full disk is the error of `write_whole`."""
    # A file, not its path: that would be written into the state, and it has another name each time.
    with replacing(path, durable=durable) as unfinished, unfinished.open("wb") as file:
        told: Any = _Telling(file)
        try:
            torch.save(value, told)
        except RuntimeError:
            if told.error is not None:  # torch's writer hides why it could not write
                raise told.error from None
            raise


class _Telling:
    """A file that remembers why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()
