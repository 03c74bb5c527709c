"""The queue of deferred work: the one place where a step waits in order to do many things at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from pergrad.runtime import internals
from pergrad.runtime.precision import without_autocast

__all__ = ["Queue"]

_Stream = tuple[int, int, int]  # its id, and the index and the type of its device
_Work = tuple[Callable[[], object], int, _Stream | None]
_CPU = torch.device("cpu")


class Queue:
    """Defers work until `bound` bytes are held by it, then runs all of it in order.

    Two kinds of work come here. On a GPU, where Python bounds the speed of a step, the rules of a backward
    run many at a time (`defers_rules`): run one by one between autograd's own nodes, each takes twice as
    long. And reductions of many parameters share one kernel launch. Work that runs may enqueue more, as a
    rule enqueues the norms of what it found.
    """

    def __init__(
        self, bound: int = 0, device: torch.device = _CPU, *, defers_rules: bool = False
    ) -> None:
        self.bound = bound
        self.defers_rules = defers_rules
        self._device = device
        self.work: deque[_Work] = deque()
        self._held = 0
        self._counting = Lock()  # autograd has a thread for each device
        self._draining = Lock()

    def put(
        self, work: Callable[[], object], held: int = 0, *, in_this_stream: bool = False
    ) -> None:
        """Enqueues `work`, which keeps `held` bytes alive.

        With `in_this_stream` it runs in the CUDA stream that is current now; otherwise in the one that is
        current when the queue is drained.
        """
        self.work.append((work, held, _current_stream() if in_this_stream else None))
        if held:
            self.hold(held)

    def hold(self, more: int) -> None:
        """Counts `more` bytes that enqueued work keeps alive, and drains the queue if they are too many."""
        with self._counting:
            self._held += more
        if self._held >= self.bound:
            self.drain()

    def release(self, held: int) -> None:
        """Counts fewer bytes: work that has run keeps nothing alive."""
        with self._counting:
            self._held -= held

    def drain(self) -> None:
        """Runs all work, in order; drops the rest after an error.

        Does nothing while the queue is being drained: what is enqueued then runs in that drain.
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
                    del work  # and with it the tensors that it has kept alive

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
    """Within, kernels are launched in `stream`; afterwards the current stream waits for them."""
    if stream is None or stream == _current_stream():
        yield
        return
    number, device, kind = stream
    there = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    with torch.cuda.stream(there):
        yield
    torch.cuda.current_stream(device).wait_stream(there)
