"""Memory for large results on the CPU: first touching fresh pages costs more than the arithmetic.

So what a large result lay in is kept when nobody holds it any more, and the next one of about that size is
written there: from the second step on, a training loop asks the system for no memory. It is the system's to
take back all the while, should memory be short, and never more than results have needed at once. With
PERGRAD_KEEP_MEMORY=0 in the environment nothing is kept, and `clear_caches` gives back what is free.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from pergrad.runtime.caches import CACHES
from pergrad.runtime.tracing import operation

__all__ = ["empty", "is_large", "keeps_memory", "large_result", "product", "products", "zeros"]

# Above this, a result is worth the few microseconds in Python. A (64, 512, 512) float32 product took 46 ms in
# fresh pages, and takes 8 in those that are there.
_LARGE = 2**20
_HUGE_PAGE = 2**21


class _Block(mmap.mmap):
    """Some memory of its own; `size` bytes at least."""

    is_huge = False

    def __new__(cls, size: int) -> _Block:
        # Whole huge pages: then the kernel lets it begin with one.
        length = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        return super().__new__(cls, -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def take_huge_pages(self, size: int) -> None:
        """Have the first `size` bytes in huge pages once they are written to, what is over not."""
        self.is_huge = True
        with suppress(OSError):  # a kernel without them
            self.madvise(mmap.MADV_HUGEPAGE, 0, size // _HUGE_PAGE * _HUGE_PAGE)

    def offer(self) -> None:
        """Let the system take the pages back before it runs short of memory, what is in them included."""
        with suppress(OSError):  # a kernel that cannot
            self.madvise(mmap.MADV_FREE)


class _KeptMemory:
    """Memory of results, and of results that were: handed out again once nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[_Block] = deque()  # by whoever lets go of a result, in any thread
        self._free: list[_Block] = []  # the one that has lain there longest first
        self._in_use = self._most_in_use = 0  # bytes

    def clear(self) -> None:
        """Give all that is free back to the system."""
        with self._lock:
            self._collect()
            self._free.clear()
            self._most_in_use = self._in_use

    def __len__(self) -> int:
        return len(self._free)

    def take(self, size: int) -> memoryview:
        """As many bytes, that are whatever was written there before; free again when the view is gone."""
        with self._lock:
            self._collect()
            block = self._fitting(size)
            self._in_use += len(block)
            self._most_in_use = max(self._most_in_use, self._in_use)
            spare = sum(map(len, self._free))
            while spare > self._most_in_use:
                spare -= len(self._free.pop(0))
        view = memoryview(block)[:size]
        weakref.finalize(view, self._put_back, block).atexit = False
        return view

    def _put_back(self, block: _Block) -> None:
        # No lock here: the garbage collector may call this in the midst of `take`.
        block.offer()
        self._returned.append(block)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= len(block)
            self._free.append(block)

    def _fitting(self, size: int) -> _Block:
        """The smallest that will do and would not be half empty, or a fresh one.

        The first time that one is used again it becomes a fresh one in huge pages. The kernel may be slow to
        give them, up to 3 s for a gigabyte where it has to move others' pages for it, and what is computed
        once should not wait for that; but they are offered to it and taken back at no cost, where small ones
        take 7% of the time of a product.
        """
        length = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        fitting = [block for block in self._free if length <= len(block) < 2 * length]
        if not fitting:
            return _Block(size)
        block = min(fitting, key=len)
        self._free.remove(block)
        if not block.is_huge:
            block = _Block(size)
            block.take_huge_pages(size)
        return block


_MEMORY = _KeptMemory()
CACHES.add(
    __name__, "memory of large results on the CPU", "the most that was in use at once", _MEMORY
)


def keeps_memory() -> bool:
    """Whether memory of large results is kept: unless the environment has PERGRAD_KEEP_MEMORY=0."""
    return os.environ.get("PERGRAD_KEEP_MEMORY", "1") != "0"


def is_large(shape: Sequence[int], like: Tensor) -> bool:
    """Whether a result of that shape is worth being written to kept memory."""
    is_there = like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")  # on Linux
    return is_there and prod(shape) * like.element_size() >= _LARGE and keeps_memory()


def large_result(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """An uninitialised tensor to write a result to, in kept memory, where that pays; else None."""
    if type(like) is not Tensor or not is_large(shape, like):
        return None
    size = prod(shape) * like.element_size()
    return torch.frombuffer(_MEMORY.take(size), dtype=like.dtype).view(shape)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Uninitialised, in kept memory where that pays."""
    kept = large_result(shape, like)
    return like.new_empty(shape) if kept is None else kept


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros, in kept memory where that pays."""
    kept = large_result(shape, like)
    return like.new_zeros(shape) if kept is None else kept.zero_()


# A compiler allocates all by itself; these it calls as they are, with whatever strides there are.


@operation("products", lambda a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[2]))
def products(a: Tensor, b: Tensor) -> Tensor:
    """A @ b, (n, p, q) @ (n, q, s), in kept memory where that pays."""
    return torch.bmm(a, b, out=large_result((a.shape[0], a.shape[1], b.shape[2]), a))


@operation("product", lambda a, b: a.new_empty(torch.broadcast_shapes(a.shape, b.shape)))
def product(a: Tensor, b: Tensor) -> Tensor:
    """A ⊙ b, of one type, in kept memory where that pays."""
    return torch.mul(a, b, out=empty(torch.broadcast_shapes(a.shape, b.shape), a))
