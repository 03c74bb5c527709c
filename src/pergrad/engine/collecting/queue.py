"""Gradients that have come and are not looked at yet: on a GPU they wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

import torch

__all__ = ["Arrivals"]

_Stream = tuple[int, int, int]  # its number, and the number and the type of its device


class Arrivals:
    """What taps have brought, to be taken in many at a time.

    Between two functions of a backward the processor has forgotten the Python code of the last tap: each by
    itself takes twice as long. On a GPU that is what a step waits for. What waits is held: `bound` says how
    many bytes may be.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._waiting: dict[_Stream | None, list[Callable[[], object]]] = {}
        self._held = 0
        self._lock = Lock()  # each device has a thread of its own in a backward

    def add(self, take_in: Callable[[], object], held: int) -> None:
        """Call `take_in` later, in the stream of now; until then it holds so many bytes."""
        with self._lock:
            self._waiting.setdefault(_current_stream(), []).append(take_in)
            self._held += held

    @property
    def are_none(self) -> bool:
        return not self._waiting

    @property
    def are_too_many(self) -> bool:
        """Whether it is time to take them in."""
        return self._held > self._bound

    def take_in(self) -> None:
        """Take in all that waits."""
        with self._lock:
            waiting = self._waiting
            self.clear()
        for stream, those in waiting.items():
            those.reverse()
            with _in(stream), torch.no_grad():
                while those:  # which lets go of each
                    those.pop()()

    def clear(self) -> None:
        self._waiting, self._held = {}, 0


def _current_stream() -> _Stream | None:
    if not torch.cuda.is_initialized():
        return None
    found: _Stream = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    return found


@contextmanager
def _in(stream: _Stream | None) -> Iterator[None]:
    """Within, kernels are launched there; what is launched later elsewhere waits for them."""
    if stream is None or stream == _current_stream():
        yield
        return
    number, device, kind = stream
    there = torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind)
    with torch.cuda.stream(there):
        yield
    torch.cuda.current_stream(device).wait_stream(there)
