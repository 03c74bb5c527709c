"""Joins the chunks of an audit one at a time; matrices too large for memory go into a file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pergrad.audit.streaming.chunks import (
    Chunk,
    Span,
    gaps,
    kept_of,
    kept_spans,
    path_of,
    read_chunk,
    refuse_other_samples,
)
from pergrad.audit.streaming.gradients import Rows
from pergrad.errors import AuditError

__all__ = ["read_all"]

_MATRICES = ("sketch", "free")  # a few hundred numbers a sample; all else is a few
_IN_MEMORY = 2**28  # bytes of a matrix; larger ones are mapped from a file
_MOVED = 4096  # rows at a time


def read_all(
    folder: Path,
    indices: np.ndarray,
    written: Mapping[Span, Chunk] | None = None,
    *,
    in_memory: int = _IN_MEMORY,
) -> tuple[Chunk, dict[int, int]]:
    """Joins all chunks in order of index and counts the rows by batch size; refuses missing rows.

    Chunks in `written`, which this process wrote itself, are not read again. One chunk is in memory at a
    time: sketches of more than `in_memory` bytes go into a file beside the chunks, which has no name and is
    gone with the process.
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
    joined = _Joined(folder, indices, in_memory)
    for span in spans:
        path = path_of(folder, *span)
        chunk = written[span] if span in written else read_chunk(path)
        refuse_other_samples(path, chunk, indices)
        joined.add(chunk)
    return joined.whole(), joined.sizes


class _Joined:
    """Rows of the chunks added so far."""

    def __init__(self, folder: Path, indices: np.ndarray, in_memory: int) -> None:
        self._folder, self._in_memory = folder, in_memory
        self._indices = indices
        # Batches of a token budget are not in order of index.
        self._place = np.empty(len(indices), dtype=np.int64)
        self._place[np.argsort(indices, kind="stable")] = np.arange(len(indices))
        self._matrices: dict[str, np.ndarray] = {}
        self._chunks: list[Chunk] = []  # without matrices
        self._places: list[np.ndarray] = []
        self.sizes: dict[int, int] = {}

    def add(self, chunk: Chunk) -> None:
        self.sizes[chunk.batch_size] = self.sizes.get(chunk.batch_size, 0) + len(chunk.rows)
        if len(chunk.rows) == 0:
            self._chunks.append(chunk)
            return
        own = slice(chunk.start, chunk.stop)
        kept = np.isin(self._indices[own], kept_of(self._indices[own], chunk.skipped))
        places = self._place[own][kept]
        for name in _MATRICES:
            values = getattr(chunk.rows, name)
            if values is None:
                continue
            if name not in self._matrices:
                shape = (len(self._indices), *values.shape[1:])
                self._matrices[name] = self._made(shape, values.dtype)
            self._matrices[name][places] = values
        self._places.append(places)
        light = replace(chunk.rows, sketch=np.empty((len(places), 0)), free=None)
        self._chunks.append(replace(chunk, rows=light))

    def _made(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        if prod(shape) * dtype.itemsize <= self._in_memory:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            return np.memmap(file, dtype, "w+", shape=shape)

    def whole(self) -> Chunk:
        skipped = {index: why for chunk in self._chunks for index, why in chunk.skipped.items()}
        seconds: dict[str, float] = {}
        for chunk in self._chunks:
            for phase, value in chunk.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + value
        filled = [chunk for chunk in self._chunks if len(chunk.rows)]
        about = (min(self.sizes), seconds, skipped)
        if not filled:
            return Chunk(
                0, len(self._indices), np.empty(0, np.int64), self._chunks[0].rows, None, *about
            )
        places = np.concatenate(self._places)
        order = np.argsort(places, kind="stable")
        columns: dict[str, Any] = {}
        for field in fields(Rows):
            parts = [getattr(chunk.rows, field.name) for chunk in filled]
            columns[field.name] = None if parts[0] is None else np.concatenate(parts)[order]
        columns |= {name: self._packed(m, places[order]) for name, m in self._matrices.items()}
        labels: list[str] | None = None
        if all(chunk.labels is not None for chunk in filled):
            found = [label for chunk in filled for label in chunk.labels or ()]
            labels = [found[n] for n in order.tolist()]
        index = np.concatenate([chunk.index for chunk in filled])[order]
        return Chunk(0, len(self._indices), index, Rows(**columns), labels, *about)

    def _packed(self, matrix: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Moves rows up to where samples were skipped; `places` increase."""
        if len(places) < len(matrix):
            for start in range(0, len(places), _MOVED):
                some = slice(start, start + _MOVED)
                matrix[some.start : some.start + len(places[some])] = matrix[places[some]]
        return matrix[: len(places)]
