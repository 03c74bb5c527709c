"""Shares the batches of an audit among its processes, and notices when one of them has ended."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from pergrad.audit.streaming.chunks import Span
from pergrad.audit.streaming.ranks import Ranks
from pergrad.errors import InterruptedAuditError

__all__ = ["Beats", "Queue", "shared_items", "together_alive"]

_SHARES = 16  # items for each process: the last ones to finish wait for little
_EVERY = 3.0  # seconds between two signs of life
_SILENT = 20.0  # seconds without one after which a process counts as dead
_GRACE = 10.0  # seconds to save rows, once a process is known to be dead
_STOPPED = 3  # the exit code of an audit that can resume
_WAIT = timedelta(seconds=20)
_FAILED = "failed"  # key in the store: which process has stopped by an error


def shared_items(batches: Sequence[Span], ranks: int) -> list[Span]:
    """Joins consecutive batches to items of work, sixteen for each process if there are as many.

    >>> shared_items([(0, 4), (4, 8), (8, 10)], 1)
    [(0, 4), (4, 8), (8, 10)]
    """
    each = max(1, len(batches) // (_SHARES * ranks))
    items: list[Span] = []
    for number, (start, stop) in enumerate(batches):
        if items and number % each and items[-1][1] == start:
            items[-1] = items[-1][0], stop
        else:
            items.append((start, stop))
    return items


class Queue:
    """Hands out items of work, each to one process, in order; counts the samples that all have finished."""

    def __init__(self, items: Sequence[Span], store: dist.Store | None = None) -> None:
        self._items = items
        self._store = store
        self._next = self._seen = 0

    def claim(self) -> Span | None:
        """Returns an item that no other process gets, or None if none is left."""
        if self._store is None:
            number, self._next = self._next, self._next + 1
        else:
            number = self._added("next", 1) - 1
        return self._items[number] if number < len(self._items) else None

    def finished(self, samples: int) -> int:
        """Adds samples of this process; returns how many all have finished since the last call."""
        if self._store is None:
            return samples
        before, self._seen = self._seen, self._added("done", samples)
        return self._seen - before

    def _added(self, key: str, count: int) -> int:
        assert self._store is not None
        try:
            return self._store.add(key, count)
        except RuntimeError as error:  # the store lives in the first process
            raise InterruptedAuditError(_message("process 0 has ended")) from error


class Beats:
    """Gives signs of life to the other processes, and watches theirs, in a thread of its own."""

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self._store = store
        self._ranks = ranks
        self._over = threading.Event()
        self.lost: str | None = None  # what has happened to another process
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises an error if another process has ended."""
        if self.lost is not None:
            raise InterruptedAuditError(_message(self.lost))

    def stop(self) -> None:
        self._over.set()
        self._thread.join(_EVERY)

    def _run(self) -> None:
        others = [n for n in range(self._ranks.count) if n != self._ranks.number]
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._over.wait(_EVERY):
            count += 1
            try:
                self._store.set(f"alive/{self._ranks.number}", str(count))
                if self._store.check([_FAILED]):
                    self._end(self._store.get(_FAILED).decode())
                    return
                for number in others:
                    found = self._store.get(f"alive/{number}")
                    if number not in seen or seen[number][0] != found:
                        seen[number] = found, time.monotonic()
            except Exception:  # the store lives in the first process
                if not self._over.is_set():
                    self._end("process 0 has ended")
                return
            for number, (_, since) in seen.items():
                if time.monotonic() - since > _SILENT:
                    self._end(f"process {number} gives no sign of life")
                    return

    def _end(self, what: str) -> None:
        """Lets this process save its rows; ends it if it cannot, as in a collective that waits forever."""
        self.lost = what
        if not self._over.wait(_GRACE):
            print(f"pergrad: {_message(what)}", file=sys.stderr, flush=True)
            os._exit(_STOPPED)


def _message(what: str) -> str:
    return f"{what}: all rows written so far are kept; run the same command to resume"


@contextmanager
def together_alive(ranks: Ranks) -> Iterator[tuple[dist.Store | None, Beats | None]]:
    """Yields a store that all processes share, and their signs of life; None of both for one process."""
    if ranks.count == 1:
        yield None, None
        return
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    options = {"timeout": _WAIT, "wait_for_workers": False}
    store: dist.TCPStore | None = None
    if ranks.is_first:
        store = dist.TCPStore(host, 0, is_master=True, **options)  # type: ignore[arg-type]
    port = ranks.all_agree(None if store is None else store.port)[0]
    if store is None:
        assert port is not None
        store = dist.TCPStore(host, port, is_master=False, **options)  # type: ignore[arg-type]
    store.set(f"alive/{ranks.number}", "0")
    ranks.all_agree(None)  # all have given a first sign
    # Beats have a connection of their own: a store serves one call at a time.
    beats = Beats(dist.TCPStore(host, port, is_master=False, **options), ranks)  # type: ignore[arg-type]
    try:
        yield store, beats
    except BaseException as error:
        with suppress(Exception):  # the store lives in the first process
            store.set(_FAILED, f"process {ranks.number} has stopped ({type(error).__name__})")
        raise
    finally:
        beats.stop()
