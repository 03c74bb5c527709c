"""Writes and reads chunks: the rows of consecutive samples in one file, what belongs to them in another."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.audit.streaming.chunks import Span
from pergrad.audit.streaming.files import write_whole
from pergrad.errors import IndexingError

__all__ = ["Chunk", "Facts", "facts_file", "read_facts", "spans_in", "write_chunk"]

_NAME = re.compile(r"(\d{12})-(\d{12})\.npz")
_MAGIC = 128  # bytes before the rows of a file: numpy pads its header to a multiple of 64


@dataclass(frozen=True)
class Facts:
    """What is known of the rows of one chunk, beside the rows."""

    index: np.ndarray  # (n,) int64, in the data set; over all data sets that were appended
    loss: np.ndarray  # (n, c) float64, at each checkpoint
    norm: np.ndarray  # (n, c) float64, of the whole gradient
    scale: np.ndarray  # (n, c) float32, what the stored numbers are multiplied by
    token: np.ndarray | None = None  # (n,) int32, the position of the token, in an index of tokens
    labels: list[str] | None = None
    skipped: Mapping[int, str] = field(default_factory=dict)  # index of an unreadable item -> why

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class Chunk:
    """Rows of the samples at positions start to stop."""

    span: Span
    rows: np.ndarray  # (n, width), as stored
    facts: Facts


def write_chunk(folder: Path, chunk: Chunk) -> None:
    """Writes the rows, then the facts; the chunk exists once its facts do."""
    name = _name(chunk.span)
    held = io.BytesIO()
    np.save(held, np.ascontiguousarray(chunk.rows))
    write_whole(folder / f"{name}.npy", held.getbuffer())
    facts = chunk.facts
    arrays: dict[str, Any] = {
        "index": facts.index,
        "loss": facts.loss,
        "norm": facts.norm,
        "scale": facts.scale,
        **({} if facts.token is None else {"token": facts.token}),
        "about": np.frombuffer(
            json.dumps(
                {
                    "labels": facts.labels,
                    "skipped": dict(facts.skipped),
                    "width": chunk.rows.shape[1],
                }
            ).encode(),
            dtype=np.uint8,
        ),
    }
    held = io.BytesIO()
    np.savez(held, **arrays)
    write_whole(folder / f"{name}.npz", held.getbuffer())


def _name(span: Span) -> str:
    return f"{span[0]:012d}-{span[1]:012d}"


def spans_in(folder: Path) -> list[Span]:
    """Returns the spans of all chunks, sorted, from their file names."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("*.npz"))
    return sorted((int(named[1]), int(named[2])) for named in found if named is not None)


def rows_file(folder: Path, span: Span) -> Path:
    """Returns the file with the rows of a chunk."""
    return folder / f"{_name(span)}.npy"


def facts_file(folder: Path, span: Span) -> Path:
    """Returns the file with what belongs to the rows of a chunk."""
    return folder / f"{_name(span)}.npz"


def read_facts(folder: Path, span: Span) -> Facts:
    """Reads the facts of a chunk; the error for an incomplete file names it."""
    path = facts_file(folder, span)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            about = json.loads(held["about"].tobytes())
            facts = Facts(
                held["index"],
                held["loss"],
                held["norm"],
                held["scale"],
                held.get("token"),
                about["labels"],
                {int(index): why for index, why in about["skipped"].items()},
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    rows = rows_file(folder, span)
    try:
        shape = np.load(rows, mmap_mode="r").shape if len(facts) else (0,)
    except (OSError, EOFError, ValueError) as error:
        raise _corrupt(rows, f"{type(error).__name__}: {error}") from error
    if shape[0] != len(facts):
        raise _corrupt(rows, f"{shape[0]} rows, expected {len(facts)}")
    return facts


def _corrupt(path: Path, why: str) -> IndexingError:
    return IndexingError(
        f"{path} is corrupt ({why}): remove this file and run the same build to compute its rows again"
    )


def joined_facts(parts: Sequence[Facts]) -> Facts:
    """Concatenates the facts of all parts, in order."""
    full = [part for part in parts if len(part)]
    skipped = {index: why for part in parts for index, why in part.skipped.items()}
    if not full:
        none = np.zeros((0, 0))
        return Facts(np.zeros(0, np.int64), none, none, none.astype(np.float32), skipped=skipped)
    tokens = [part.token for part in full if part.token is not None]
    known = all(part.labels is not None for part in full)
    index, loss, norm, scale = (
        np.concatenate([getattr(part, name) for part in full])
        for name in ("index", "loss", "norm", "scale")
    )
    return Facts(
        index,
        loss,
        norm,
        scale,
        np.concatenate(tokens) if tokens else None,
        [label for part in full for label in part.labels or ()] if known else None,
        skipped,
    )
