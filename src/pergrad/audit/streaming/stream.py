"""Passes over the data batch by batch, saves chunks, and halves the batch when memory runs out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from pergrad.audit.streaming.chunks import Chunk, Span, kept_of, write_chunk
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.gradients import Gradients, Rows, joined_rows
from pergrad.audit.streaming.loading import Loaded, Loader, drawing_from
from pergrad.audit.streaming.memory import is_out_of_memory
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.subject.places import told
from pergrad.distributed.groups import is_of_lost_rank, is_running
from pergrad.errors import AuditError, InterruptedAuditError, PergradError

__all__ = ["Stream", "Watch", "Work", "batches_in", "shard"]

_MOST_HELD = 2**26  # bytes of sketches that stay in memory
_MOST_ROWS = 1 << 16  # per chunk, even if it is not yet time to save


class Watch(Protocol):
    """Receives the progress of an audit."""

    def begin(self, samples: int, done: int) -> None: ...

    def advance(self, samples: int) -> None: ...

    def say(self, message: str) -> None: ...


def batches_in(spans: Sequence[Span], size: int, padded: np.ndarray | None = None) -> list[Span]:
    """Splits the spans at multiples of the batch size.

    So batches do not depend on where an audit resumes or on the number of processes. If the padded lengths
    of all samples are given, in increasing order, the size is a number of tokens, and a batch has samples of
    one padded length.

    >>> batches_in([(0, 3), (6, 11)], 4)
    [(0, 3), (6, 8), (8, 11)]
    """
    found = []
    for start, stop in spans:
        while start < stop:
            first, last, count = 0, stop, size
            if padded is not None:
                length = padded[start]
                first = int(np.searchsorted(padded, length, side="left"))
                last = int(np.searchsorted(padded, length, side="right"))
                count = max(1, size // int(length))
            end = min(stop, last, first + ((start - first) // count + 1) * count)
            found.append((start, end))
            start = end
    return found


def shard(batches: Sequence[Span], rank: int, count: int) -> list[Span]:
    """Returns one rank's share of the batches, consecutive ones."""
    return list(batches[rank * len(batches) // count : (rank + 1) * len(batches) // count])


def _is_of_lost_process(error: BaseException | None) -> bool:
    """Whether an error came about because another process of a sharded model has ended."""
    if error is None or not is_running():
        return False
    return is_of_lost_rank(error) or _is_of_lost_process(error.__cause__ or error.__context__)


@dataclass
class _Pending:
    """Consecutive rows that are computed but not saved yet."""

    start: int
    batch_size: int
    rows: list[Rows] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    skipped: dict[int, str] = field(default_factory=dict)
    loaded: int = 0  # samples, with those that were skipped
    seconds: dict[str, float] = field(default_factory=lambda: {"loading": 0.0, "gradients": 0.0})
    since: float = 0.0

    @property
    def stop(self) -> int:
        return self.start + self.loaded


class Work:
    """Claims items of work one after the other; `left` are those that are not finished."""

    def __init__(self, claim: Callable[[], Span | None], padded: np.ndarray | None = None) -> None:
        self._claim = claim
        self.padded = padded
        self.left: list[Span] = []

    def batches(self, size: int) -> Iterator[Span]:
        """Yields the batches of what is left, then of new items."""
        yield from batches_in(list(self.left), size, self.padded)
        while (item := self._claim()) is not None:
            self.left.append(item)
            yield from batches_in([item], size, self.padded)


class Stream:
    """Computes the rows of batches and saves them.

    `finished` is told the samples of each batch and returns by how many to advance; `check` may raise.
    """

    def __init__(
        self,
        folder: ResultsFolder,
        loader: Loader,
        gradients: Gradients,
        indices: np.ndarray,
        *,
        seed: int,
        workers: int,
        save_every: float,
        watch: Watch,
        finished: Callable[[int], int] = lambda samples: samples,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._finished, self._check = finished, check
        self._folder = folder
        self._loader = loader
        self._gradients = gradients
        self._indices = indices
        self._seed = seed
        self._workers = workers
        self._save_every = save_every
        self._watch = watch
        self._pending: _Pending | None = None
        self._since = 0.0  # start time of the next chunk
        self._runs_together = False  # with other processes, batch by batch
        self.written: dict[Span, Chunk] = {}  # the first chunks, for the analysis
        self._held = 0  # bytes of sketches, with those of other chunks

    def run(self, work: Work, batch_size: int) -> None:
        """Computes and saves the rows of all items of work; saves finished rows even after an error."""
        size = batch_size
        self._since = time.perf_counter()
        while True:
            try:
                self._run_while_it_fits(work, size)
            finally:
                self._save()
            if not work.left:
                return
            size = self._shrunk(work, size)

    def run_together(
        self, batches: Sequence[Span], stand_in: Loaded, ranks: Ranks, size: int
    ) -> None:
        """Computes and saves the rows of this process's batches of a model that needs all processes.

        All of them run as many batches as the one with most. A process without one, or with none but
        unreadable items, computes the stand-in meanwhile, and drops its rows.
        """
        self._since = time.perf_counter()
        self._runs_together = True
        loaded = self._loader.batches(batches, self._workers)
        try:
            for _ in range(max(ranks.all_agree(len(batches)))):
                self._check()
                batch = ranks.together(lambda: next(loaded, None))
                has_rows = batch is not None and batch.count > 0
                found = self._rows_or_none(batch if batch is not None and has_rows else stand_in)
                if found is None:
                    raise self._out_of_memory(batch or stand_in, size)
                if batch is not None:
                    self._take(batch, found if has_rows else (None, 0.0), size)
                    self._watch.advance(self._finished(batch.stop - batch.start))
        finally:
            self._save()

    def _out_of_memory(self, batch: Loaded, size: int) -> InterruptedAuditError:
        """Says how to go on where the others wait for this process in the middle of a batch."""
        what = f"out of memory with a batch of {batch.count} samples of a sharded model"
        if batch.count > 1:
            self._folder.note_batch_size(max(1, size // 2))
            return InterruptedAuditError(
                f"{what}; all rows so far are kept: run the same command to resume with smaller batches"
            )
        return InterruptedAuditError(
            f"{what}; all rows so far are kept: free memory, or shard it over more processes, and run the "
            "same command to resume"
        )

    def _run_while_it_fits(self, work: Work, size: int) -> None:
        """Removes finished rows from `work.left`; returns early if a batch does not fit into memory."""
        for batch in self._loader.batches(work.batches(size), self._workers):
            self._check()
            rows = self._rows_or_none(batch)
            if rows is None:
                return
            self._take(batch, rows, size)
            start, stop = work.left.pop(0)
            assert start == batch.start
            if batch.stop < stop:
                work.left.insert(0, (batch.stop, stop))
            self._watch.advance(self._finished(batch.stop - batch.start))

    def _rows_or_none(self, batch: Loaded) -> tuple[Rows | None, float] | None:
        """Returns the rows of a batch (None if all were skipped) and the seconds; None if memory ran out."""
        began = time.perf_counter()
        try:
            with drawing_from(self._seed, batch.start):
                rows = self._gradients.rows(batch.arguments, batch.count) if batch.count else None
        except Exception as error:
            if is_out_of_memory(error):
                return None
            if _is_of_lost_process(error):
                raise InterruptedAuditError(
                    "another process has ended: all rows written so far are kept; run the same command to "
                    "resume"
                ) from error
            if isinstance(error, PergradError) and not isinstance(error, AuditError):
                raise
            own = isinstance(error, AuditError)
            what = str(error) if own else f"the backward raised {told(error)}"
            raise AuditError(f"{what} ({self._named(batch)})") from error
        self._note_fallback()
        return rows, time.perf_counter() - began

    def _named(self, batch: Loaded) -> str:
        """Names the samples of a batch that failed; the first one that fails alone, if others do not.

        Processes of a sharded model run all batches together, so that none can run a part alone.
        """
        start, stop, is_of_some = batch.start, batch.stop, False
        while stop - start > 1 and not self._runs_together:
            middle = (start + stop) // 2
            failed = [half for half in ((start, middle), (middle, stop)) if self._fails(*half)]
            is_of_some |= len(failed) == 1
            if not failed:  # it takes several of them
                break
            start, stop = failed[0]
        if not is_of_some:
            start, stop = batch.start, batch.stop
        first, last = self._indices[start], self._indices[stop - 1]
        return f"sample {first}" if first == last else f"samples {first} to {last}"

    def _fails(self, start: int, stop: int) -> bool:
        try:
            with drawing_from(self._seed, start):
                part = self._loader.load(start, stop)
                if part.count:
                    self._gradients.rows(part.arguments, part.count)
        except Exception:
            return True
        return False

    def _note_fallback(self) -> None:
        reason = self._gradients.fallback
        if reason is not None and self._folder.fallback is None:
            self._folder.note_fallback(reason)
            self._watch.say(f"the gradients are computed sample by sample, which is slow: {reason}")

    def _take(self, batch: Loaded, found: tuple[Rows | None, float], size: int) -> None:
        rows, seconds = found
        if self._pending is not None and self._pending.stop != batch.start:
            self._save()
        if self._pending is None:
            self._pending = _Pending(batch.start, size, since=self._since)
        pending = self._pending
        if rows is not None:
            pending.rows.append(rows)
        pending.loaded += batch.stop - batch.start
        pending.skipped |= batch.skipped
        pending.labels += batch.labels or []
        pending.seconds["loading"] += batch.seconds
        pending.seconds["gradients"] += seconds
        is_due = time.perf_counter() - pending.since >= self._save_every
        if is_due or pending.stop - pending.start >= _MOST_ROWS:
            self._save()

    def _save(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        chunk = Chunk(
            pending.start,
            pending.stop,
            kept_of(self._indices[pending.start : pending.stop], pending.skipped),
            joined_rows(pending.rows),
            pending.labels or None,
            pending.batch_size,
            {**pending.seconds, "streaming": time.perf_counter() - pending.since},
            pending.skipped,
        )
        self._since = time.perf_counter()
        write_chunk(self._folder.chunks, chunk)
        self._held += chunk.rows.sketch.nbytes
        if self._held <= _MOST_HELD:  # the others are read again
            self.written[chunk.start, chunk.stop] = chunk

    def _shrunk(self, work: Work, size: int) -> int:
        """Returns half of the batch size that did not fit."""
        span = work.left[0]
        tried = batches_in([span], size, work.padded)[0]
        samples = tried[1] - tried[0]
        if samples == 1:
            raise InterruptedAuditError(
                f"out of memory with a batch of one sample (index {self._indices[span[0]]}); all rows so far "
                "are kept: free memory and run the same command to resume"
            )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        # The last batch may have fewer samples than the batch size.
        smaller = size // 2
        length = 1 if work.padded is None else int(work.padded[tried[0]])
        while smaller // length >= samples:
            smaller //= 2
        self._folder.note_batch_size(smaller)
        unit = "" if work.padded is None else " tokens"
        self._watch.say(f"out of memory with batches of {samples}; continuing with {smaller}{unit}")
        return smaller
