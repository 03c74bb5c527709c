"""Manages the folder of an index: adds chunks, reads rows block by block, deletes and compacts."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pergrad
from pergrad.audit.streaming.chunks import Span, gaps
from pergrad.audit.streaming.files import is_unfinished, made_folder, write_whole
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.errors import AuditError, IndexingError
from pergrad.index.store.chunks import (
    Chunk,
    Facts,
    facts_file,
    joined_facts,
    read_facts,
    rows_file,
    spans_in,
    write_chunk,
)
from pergrad.index.store.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from pergrad.index.store.numbers import StoredDtype, bytes_each, checked_dtype, type_on_disk
from pergrad.index.store.saved import save_whole

__all__ = ["Block", "Store"]

_DELETED = "deleted.npy"
_BLOCK = 32 * 2**20  # bytes read at once


@dataclass(frozen=True)
class Block:
    """Consecutive rows, as they are stored; the memory is reused by the next block."""

    start: int  # of the first row among all that are kept
    rows: np.ndarray  # (n, c·k)
    facts: Facts
    kept: np.ndarray | None  # numbers of the rows that are not deleted; None: all

    def __len__(self) -> int:
        return len(self.rows) if self.kept is None else len(self.kept)


class Store:
    """An index on disk.

    `index.json` describes it, `rows-N/` has the chunks, `deleted.npy` the samples that do not count any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)

    @staticmethod
    def begin(path: Path, manifest: Manifest) -> Store:
        """Makes an empty index in a new or empty folder."""
        refuse_other_files(path)
        (path / f"rows-{manifest.generation}").mkdir(exist_ok=True)
        write_manifest(path, manifest, pergrad.__version__)
        return Store(path)

    @staticmethod
    def locked(path: Path) -> AbstractContextManager[None]:
        """Locks the folder against another process that writes to it."""
        return ResultsFolder(path).locked()

    @property
    def rows(self) -> Path:
        """Returns the folder with the chunks."""
        return self.path / f"rows-{self.manifest.generation}"

    @property
    def dtype(self) -> StoredDtype:
        return checked_dtype(self.manifest.identity["dtype"])

    @property
    def width(self) -> int:
        """Returns the numbers of a row over all checkpoints."""
        return self.manifest.width * self.manifest.checkpoints

    def change(self, **changes: Any) -> None:
        """Rewrites the manifest."""
        self.manifest = replace(self.manifest, **changes)
        write_manifest(self.path, self.manifest, pergrad.__version__)
        self._forget()

    def missing(self) -> list[Span]:
        """Returns the positions whose rows are not written yet."""
        return gaps(spans_in(self.rows), self.manifest.positions)

    def add(self, chunk: Chunk) -> None:
        write_chunk(self.rows, chunk)

    def refuse_unfinished(self) -> None:
        left = self.missing()
        if left:
            done = self.manifest.positions - sum(stop - start for start, stop in left)
            again = "run the same build again to resume"
            if self._is_appending(left):
                again = "run the same append again to resume, or `pergrad index abandon` to drop it"
            raise IndexingError(
                f"the index {self.path} is not finished: {done:,} of {self.manifest.positions:,} samples are "
                f"written; {again}"
            )

    def _is_appending(self, missing: Sequence[Span]) -> bool:
        """Returns whether the rows that are missing are those of the last append alone."""
        parts = self.manifest.parts
        return bool(missing) and len(parts) > 1 and missing[0][0] >= parts[-1].start

    def abandon_append(self) -> int:
        """Drops an append that was interrupted; returns how many of its samples had been written."""
        with self.locked(self.path):
            self.manifest = read_manifest(self.path)
            self._forget()
            if not self._is_appending(self.missing()):
                raise IndexingError(
                    f"the index {self.path} has no append that was interrupted: delete samples by their "
                    "indices, or remove the folder"
                )
            part = self.manifest.parts[-1]
            mine = [span for span in self.spans if span[0] >= part.start]
            for span in mine:  # facts first: rows without them are no chunk
                facts_file(self.rows, span).unlink()
                rows_file(self.rows, span).unlink(missing_ok=True)
            self.change(parts=self.manifest.parts[:-1], positions=part.start)
            self.clean()
        return sum(stop - start for start, stop in mine)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Locks a finished index, as it is on disk by now, against other processes that write to it."""
        with self.locked(self.path):
            self.manifest = read_manifest(self.path)
            self._forget()
            self.refuse_unfinished()
            self.clean()
            yield

    def clean(self) -> None:
        """Removes what killed processes have left; call it under the lock, before anything is written."""
        for rows in self.path.glob("rows-*"):  # of a compaction that was killed
            if rows != self.rows:
                shutil.rmtree(rows, ignore_errors=True)
        # Queries write what they derive from the rows without the lock: their files are left alone.
        inside = [
            p
            for name in (self.rows.name, "states", "preconditioner")
            for p in (self.path / name).glob("*")
        ]
        for path in (*self.path.glob(f"{MANIFEST}.*"), *self.path.glob(f"{_DELETED}.*"), *inside):
            if is_unfinished(path):
                path.unlink(missing_ok=True)

    def forget_derived(self) -> None:
        """Removes what was computed from the rows and a preconditioner that is another one now."""
        for path in self.path.glob("*.pt"):
            path.unlink()

    def _forget(self) -> None:
        """Drops what was read, after the files have changed."""
        for name in ("spans", "chunk_facts", "facts", "deleted", "live"):
            self.__dict__.pop(name, None)

    @cached_property
    def spans(self) -> list[Span]:
        return spans_in(self.rows)

    @cached_property
    def chunk_facts(self) -> list[Facts]:
        return [read_facts(self.rows, span) for span in self.spans]

    @cached_property
    def deleted(self) -> np.ndarray:
        """Returns the indices of the deleted samples, sorted."""
        path = self.path / _DELETED
        return np.load(path) if path.exists() else np.zeros(0, np.int64)

    @cached_property
    def facts(self) -> Facts:
        """Returns the facts of all rows that are kept, in order."""
        found = []
        for facts in self.chunk_facts:
            kept = self._kept(facts)
            found.append(facts if kept is None else _taken(facts, kept))
        return joined_facts(found)

    def __len__(self) -> int:
        """Returns the number of rows that are kept."""
        return len(self.facts)

    def _kept(self, facts: Facts) -> np.ndarray | None:
        if not len(self.deleted):
            return None
        is_kept = ~np.isin(facts.index, self.deleted)
        return None if is_kept.all() else np.flatnonzero(is_kept)

    def blocks(self, *, every: int = 1, size: int = _BLOCK) -> Iterator[Block]:
        """Yields all rows in order, some megabytes at a time; with `every`, each so many-th chunk.

        Files are read into one buffer instead of mapped: a pass over mapped files would keep all of their
        pages in this process.
        """
        itemsize = bytes_each(self.dtype)
        step = max(1, size // (self.width * itemsize))
        kind = np.dtype(f"u{itemsize}")
        buffer = np.empty((step, self.width), kind)
        start = 0
        for number, (span, facts) in enumerate(zip(self.spans, self.chunk_facts, strict=True)):
            if number % every:
                continue
            path = rows_file(self.rows, span)
            with path.open("rb", buffering=0) as file:
                shape, dtype = _header(file) if len(facts) else ((0, self.width), np.dtype(kind))
                if len(facts) and shape[1] != self.width:
                    raise IndexingError(
                        f"{path} has rows of {shape[1]} numbers, expected {self.width}"
                    )
                for at in range(0, len(facts), step):
                    some = slice(at, min(at + step, len(facts)))
                    rows = buffer[: some.stop - some.start]
                    _read_into(file, rows, path)
                    of_block = _taken(facts, some)
                    block = Block(start, rows.view(dtype), of_block, self._kept(of_block))
                    start += len(block)
                    yield block

    def derived(self, name: str, compute: Callable[[], Any], **options: Any) -> Any:
        """Returns what is computed from the rows, stored beside them until rows are added or deleted."""
        path = self.path / f"{name}.pt"
        digest = hashlib.sha256(self.deleted.tobytes()).hexdigest()[:16]
        key = [len(self), self.manifest.positions, self.manifest.generation, digest, options]
        if path.exists():
            try:
                found = torch.load(path, weights_only=True)
                if found["key"] == key:
                    return found["value"]
            except Exception:  # an unreadable file is computed again
                path.unlink(missing_ok=True)
        value = compute()
        try:
            save_whole({"key": key, "value": value}, path, durable=False)
        except AuditError:  # a folder that may only be read is still an index
            return value
        return value

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads single rows by their numbers among those that are kept: (n, c·k) as stored, and scales."""
        rows = np.empty((len(numbers), self.width), type_on_disk(self.dtype))
        scale = np.empty((len(numbers), self.manifest.checkpoints), np.float32)
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        start = 0
        for span, facts in zip(self.spans, self.chunk_facts, strict=True):
            kept = self._kept(facts)
            stop = start + (len(facts) if kept is None else len(kept))
            first, last = np.searchsorted(ordered, [start, stop])
            if first < last:
                here = ordered[first:last] - start
                here = here if kept is None else kept[here]
                mapped = np.load(rows_file(self.rows, span), mmap_mode="r")
                rows[order[first:last]] = mapped[here]
                scale[order[first:last]] = facts.scale[here]
            start = stop
        return rows, scale

    def delete(self, indices: Iterable[int]) -> int:
        """Marks samples as deleted; returns how many rows this removes."""
        wanted = _integers(indices)
        known = np.unique(self.facts.index)
        unknown = wanted[~np.isin(wanted, known)]
        if len(unknown):
            raise IndexingError(
                f"the index {self.path} has no sample {unknown[0]}"
                + (f" and {len(unknown) - 1} others" if len(unknown) > 1 else "")
                + ": see index.indices"
            )
        before = len(self)
        both = np.union1d(self.deleted, wanted)
        held = io.BytesIO()
        np.save(held, both)
        write_whole(self.path / _DELETED, held.getbuffer())
        self._forget()
        return before - len(self)

    def compact(self) -> None:
        """Rewrites all rows into chunks of equal size, without the deleted ones.

        The old rows are removed once all new ones are written: an interruption loses nothing.
        """
        manifest = self.manifest
        generation = manifest.generation + 1
        target = self.path / f"rows-{generation}"
        if target.exists():  # of a compaction that was interrupted
            shutil.rmtree(target)
        target.mkdir()
        held: list[tuple[np.ndarray, Facts]] = []
        count = written = 0
        skipped = self.facts.skipped
        for block in self.blocks():
            rows = block.rows.copy() if block.kept is None else block.rows[block.kept]
            facts = block.facts if block.kept is None else _taken(block.facts, block.kept)
            held.append((rows, facts))
            count += len(rows)
            while count >= manifest.chunk:
                written, count = _write_some(target, held, manifest.chunk, written)
        if count:
            written, count = _write_some(target, held, count, written)
        old = self.rows
        self.change(
            generation=generation,
            positions=written,
            about={**manifest.about, "skipped": {str(k): v for k, v in skipped.items()}},
        )
        (self.path / _DELETED).unlink(missing_ok=True)
        shutil.rmtree(old)
        self._forget()

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.rows.iterdir())


def _write_some(
    target: Path, held: list[tuple[np.ndarray, Facts]], count: int, written: int
) -> tuple[int, int]:
    """Writes the first `count` rows that are held; returns the rows written and held afterwards."""
    rows = np.concatenate([part for part, _ in held])
    facts = joined_facts([part for _, part in held])
    some = Facts(**{**vars(_taken(facts, slice(0, count))), "skipped": {}})
    write_chunk(target, Chunk((written, written + count), rows[:count], some))
    left = len(rows) - count
    held[:] = [(rows[count:], _taken(facts, slice(count, None)))] if left else []
    return written + count, left


def _taken(facts: Facts, rows: Any) -> Facts:
    labels = facts.labels
    if labels is not None:
        labels = labels[rows] if isinstance(rows, slice) else [labels[n] for n in rows]
    return Facts(
        facts.index[rows],
        facts.loss[rows],
        facts.norm[rows],
        facts.scale[rows],
        None if facts.token is None else facts.token[rows],
        labels,
        facts.skipped,
    )


def _header(file: Any) -> tuple[Sequence[int], np.dtype]:
    major = np.lib.format.read_magic(file)[0]
    read = (
        np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    return shape, dtype


def _read_into(file: Any, rows: np.ndarray, path: Path) -> None:
    left = memoryview(rows.data).cast("B")
    while len(left):
        got = file.readinto(left)
        if not got:
            raise IndexingError(
                f"{path} ends too early: remove this file and run the same build to compute its rows again"
            )
        left = left[got:]


def refuse_other_files(path: Path) -> None:
    """Makes the folder; refuses one that holds anything but an index."""
    try:
        made_folder(path)
    except AuditError as error:
        raise IndexingError(str(error).replace("results folder", "folder of the index")) from error
    if (path / MANIFEST).exists():
        return
    others = sorted(
        p.name
        for p in path.iterdir()
        if not is_unfinished(p) and p.name != ".lock" and not p.name.startswith("rows-")
    )
    if others:
        raise IndexingError(
            f"the folder {path} is not empty and holds no index ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}): choose another one"
        )


def _integers(indices: Iterable[int]) -> np.ndarray:
    """Returns indices, sorted; refuses what is no integer, which NumPy would round."""
    found = np.asarray([*indices] if isinstance(indices, Iterable) else indices)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise IndexingError(f"indices must be a list of integers, got {indices!r}")
    return np.unique(found.astype(np.int64))
