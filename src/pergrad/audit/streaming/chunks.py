"""Stores rows on disk, one file per chunk of consecutive samples."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.audit.streaming.files import write_whole
from pergrad.audit.streaming.gradients import CLASSIFIED, Rows, joined_rows
from pergrad.errors import AuditError

__all__ = [
    "Chunk",
    "Span",
    "gaps",
    "in_order",
    "kept_of",
    "kept_spans",
    "read_all",
    "read_chunk",
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
    write_whole(folder / f"{chunk.start:010d}-{chunk.stop:010d}.npz", held.getbuffer())


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


def read_all(
    folder: Path, indices: np.ndarray, written: Mapping[Span, Chunk] | None = None
) -> tuple[Chunk, dict[int, int]]:
    """Joins all chunks and counts the rows by batch size; refuses missing or overlapping rows.

    Chunks in `written`, which this process wrote itself, are not read again.
    """
    written = {} if written is None else written
    spans = kept_spans(folder)
    left = gaps(spans, len(indices))
    overlaps = [a for a, b in pairwise(spans) if a[1] > b[0]]
    if left or overlaps:
        what = (
            f"rows {left[0][0]} to {left[0][1]} are missing" if left else f"{overlaps[0]} overlaps"
        )
        raise AuditError(
            f"{folder} is not complete: {what}; all processes must write to one shared folder"
        )
    chunks = [
        written[a, b] if (a, b) in written else read_chunk(folder / f"{a:010d}-{b:010d}.npz")
        for a, b in spans
    ]
    for chunk in chunks:
        if not np.array_equal(
            chunk.index, kept_of(indices[chunk.start : chunk.stop], chunk.skipped)
        ):
            raise _corrupt(folder / f"{chunk.start:010d}-{chunk.stop:010d}.npz", "other samples")
    sizes: dict[int, int] = {}
    for chunk in chunks:
        sizes[chunk.batch_size] = sizes.get(chunk.batch_size, 0) + len(chunk.rows)
    return _joined(chunks), sizes


def kept_of(indices: np.ndarray, skipped: Mapping[int, str]) -> np.ndarray:
    """Returns the indices without those that were skipped."""
    return indices[~np.isin(indices, list(skipped))] if skipped else indices


def in_order(whole: Chunk) -> Chunk:
    """Returns the rows sorted by index: batches of a token budget are in the order of their lengths."""
    order = np.argsort(whole.index, kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return whole
    found: dict[str, Any] = {f.name: getattr(whole.rows, f.name) for f in fields(Rows)}
    found = {name: None if values is None else values[order] for name, values in found.items()}
    labels = None if whole.labels is None else [whole.labels[n] for n in order.tolist()]
    return replace(whole, index=whole.index[order], rows=Rows(**found), labels=labels)


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    skipped = {index: why for chunk in chunks for index, why in chunk.skipped.items()}
    last = chunks[-1].stop
    chunks = [chunk for chunk in chunks if len(chunk.rows)] or list(chunks[:1])
    labels = [chunk.labels for chunk in chunks]
    seconds: dict[str, float] = {}
    for chunk in chunks:
        for phase, value in chunk.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    return Chunk(
        0,
        last,
        np.concatenate([chunk.index for chunk in chunks]),
        joined_rows([chunk.rows for chunk in chunks]),
        None
        if any(part is None for part in labels)
        else [x for part in labels for x in part or ()],
        min(chunk.batch_size for chunk in chunks),
        seconds,
        skipped,
    )
