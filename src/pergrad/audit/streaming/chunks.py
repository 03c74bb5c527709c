"""Stores rows on disk, one file per chunk of consecutive samples."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.audit.streaming.files import write_whole
from pergrad.audit.streaming.gradients import CLASSIFIED, Rows
from pergrad.errors import AuditError

__all__ = [
    "Chunk",
    "Span",
    "gaps",
    "kept_of",
    "kept_spans",
    "path_of",
    "read_chunk",
    "refuse_other_samples",
    "write_chunk",
]

_NAME = re.compile(r"(\d{10})-(\d{10})\.npz")
Span = tuple[int, int]  # positions start to stop, stop excluded


@dataclass(frozen=True)
class Chunk:
    """Rows of the samples at positions start to stop, with the batch size and times they were computed at."""

    start: int
    stop: int
    index: np.ndarray  # (n,) int64, in the data set
    rows: Rows
    labels: list[str] | None
    batch_size: int
    seconds: dict[str, float]
    skipped: dict[int, str] = field(default_factory=dict)  # index of an unreadable item -> why


def path_of(folder: Path, start: int, stop: int) -> Path:
    """Returns the file of a chunk."""
    return folder / f"{start:010d}-{stop:010d}.npz"


def write_chunk(folder: Path, chunk: Chunk) -> None:
    """Writes the chunk atomically."""
    about = {
        "labels": chunk.labels,
        "batch_size": chunk.batch_size,
        "seconds": chunk.seconds,
        "skipped": chunk.skipped,
    }
    held = io.BytesIO()
    arrays: dict[str, Any] = {
        "index": chunk.index,
        "loss": chunk.rows.loss,
        "norm": chunk.rows.norm,
        "group_norms": chunk.rows.group_norms,
        "sketch": chunk.rows.sketch,
        **_of_classifier(chunk.rows),
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
    }
    np.savez(held, **arrays)
    write_whole(path_of(folder, chunk.start, chunk.stop), held.getbuffer())


def _of_classifier(rows: Rows) -> dict[str, np.ndarray]:
    found = {name: getattr(rows, name) for name in CLASSIFIED}
    return {name: values for name, values in found.items() if values is not None}


def read_chunk(path: Path) -> Chunk:
    """Reads a chunk; the error for an incomplete file names it."""
    named = _NAME.fullmatch(path.name)
    assert named is not None
    start, stop = int(named[1]), int(named[2])
    try:
        # np.load leaves a truncated file open, so this opens and closes it.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            about = json.loads(held["about"].tobytes())
            more = {name: held[name] for name in CLASSIFIED if name in held}
            rows = Rows(held["loss"], held["norm"], held["group_norms"], held["sketch"], **more)
            index = held["index"]
        about["skipped"] = {int(n): why for n, why in about.get("skipped", {}).items()}
        chunk = Chunk(start, stop, index, rows, **about)
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    expected = stop - start - len(chunk.skipped)
    if not len(chunk.index) == len(chunk.rows) == expected:
        raise _corrupt(path, f"{len(chunk.rows)} rows, expected {expected}")
    return chunk


def _corrupt(path: Path, why: str) -> AuditError:
    return AuditError(
        f"{path} is corrupt ({why}): remove this file and run the same command to compute its rows again"
    )


def kept_spans(folder: Path) -> list[Span]:
    """Returns the spans of all chunks, sorted, from their file names."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("*.npz"))
    return sorted((int(named[1]), int(named[2])) for named in found if named is not None)


def gaps(spans: Iterable[Span], size: int) -> list[Span]:
    """Returns the parts of 0 to size that the spans do not cover.

    >>> gaps([(2, 4), (6, 8)], 10)
    [(0, 2), (4, 6), (8, 10)]
    """
    found, at = [], 0
    for start, stop in spans:
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    return [*found, *([(at, size)] if at < size else [])]


def refuse_other_samples(path: Path, chunk: Chunk, indices: np.ndarray) -> None:
    """Refuses a chunk whose samples are not those at its positions."""
    if not np.array_equal(chunk.index, kept_of(indices[chunk.start : chunk.stop], chunk.skipped)):
        raise _corrupt(path, "other samples")


def kept_of(indices: np.ndarray, skipped: Mapping[int, str]) -> np.ndarray:
    """Returns the indices without those that were skipped."""
    return indices[~np.isin(indices, list(skipped))] if skipped else indices
