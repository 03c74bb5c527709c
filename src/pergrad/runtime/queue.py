"""Queues the work of a step that is deferred so that much of it runs at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from pergrad.runtime import internals
from pergrad.runtime.precision import without_autocast

__all__ = ["Queue"]

_Stream = tuple[int, int, int]  # stream id, device index, device type
_Work = tuple[Callable[[], object], int, _Stream | None]
_CPU = torch.device("cpu")


class Queue:
    """Defers work until it holds `bound` bytes, then runs all of it in order.

    The queue takes two kinds of work. On a GPU, where steps are bound by Python overhead, the rules of a
    backward run many at a time (`defers_rules`): between autograd's own nodes each takes twice as long.
    Reductions of many parameters are queued to share one kernel launch. Running work may enqueue more work:
    a rule enqueues the norms of its factors.
    """

    def __init__(
        self, bound: int = 0, device: torch.device = _CPU, *, defers_rules: bool = False
    ) -> None:
        self.bound = bound
        self.defers_rules = defers_rules
        self._device = device
        self.work: deque[_Work] = deque()
        self._held = 0
        self._counting = Lock()  # autograd runs one thread per device
        self._draining = Lock()

    def put(
        self, work: Callable[[], object], held: int = 0, *, in_this_stream: bool = False
    ) -> None:
        """Enqueues `work`, which keeps `held` bytes alive.

        With `in_this_stream` the work runs in the current CUDA stream, otherwise in the stream that is
        current when the queue is drained.
        """
        self.work.append((work, held, _current_stream() if in_this_stream else None))
        if held:
            self.hold(held)

    def hold(self, more: int) -> None:
        """Adds `more` bytes to those that the work keeps alive; drains the queue at the bound."""
        with self._counting:
            self._held += more
        if self._held >= self.bound:
            self.drain()

    def release(self, held: int) -> None:
        """Subtracts the bytes of work that has run and keeps nothing alive any more."""
        with self._counting:
            self._held -= held

    def drain(self) -> None:
        """Runs all work in order; after an error the rest is dropped.

        Does nothing if the queue is already being drained: that drain also runs newly enqueued work.
        """
        if not self.work or not self._draining.acquire(blocking=False):
            return
        try:
            with torch.no_grad(), without_autocast(self._device):
                self._run()
        except BaseException:
            self.clear()
            raise
        finally:
            self._draining.release()

    def _run(self) -> None:
        while self.work:
            stream = self.work[0][2]
            with _in(stream):
                while self.work and self.work[0][2] == stream:
                    work, held, _ = self.work.popleft()
                    self.release(held)
                    work()
                    del work  # frees its tensors before the next work runs

    def clear(self) -> None:
        """Drops all work."""
        self.work.clear()
        self._held = 0


def _current_stream() -> _Stream | None:
    if not torch.cuda.is_initialized():
        return None
    found: _Stream = internals.current_stream(internals.current_device())
    return found


@contextmanager
def _in(stream: _Stream | None) -> Iterator[None]:
    """Launches kernels in `stream` within the block; the current stream then waits for them."""
    if stream is None or stream == _current_stream():
        yield
        return
    number, device, kind = stream
    there = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    with torch.cuda.stream(there):
        yield
    torch.cuda.current_stream(device).wait_stream(there)
