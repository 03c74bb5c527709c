"""Reuses the memory of large results on the CPU: page faults of fresh memory cost more than the arithmetic.

The memory of a freed result is kept, and the next result of about that size is written there. From the second
step on, a training loop allocates nothing. The system can reclaim free blocks when memory is short, and the
pool never exceeds the peak that results have needed. PERGRAD_KEEP_MEMORY=0 in the environment disables the
pool; `clear_caches` returns all free blocks to the system.
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

# Smaller results do not pay for the few microseconds in Python. A (64, 512, 512) float32 product takes 46 ms
# in fresh pages and 8 ms in reused ones.
_LARGE = 2**20
_HUGE_PAGE = 2**21


class _Block(mmap.mmap):
    """Maps at least `size` bytes of anonymous memory."""

    is_huge = False

    def __new__(cls, size: int) -> _Block:
        # The kernel aligns a mapping to huge pages only if its length is a multiple of them.
        length = -(-size // _HUGE_PAGE) * _HUGE_PAGE
        return super().__new__(cls, -1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def take_huge_pages(self, size: int) -> None:
        """Requests huge pages for the first `size` bytes; the remainder keeps small ones."""
        self.is_huge = True
        with suppress(OSError):  # the kernel may not have them
            self.madvise(mmap.MADV_HUGEPAGE, 0, size // _HUGE_PAGE * _HUGE_PAGE)

    def offer(self) -> None:
        """Lets the system reclaim the pages, with their contents, when memory is short."""
        with suppress(OSError):  # the kernel may not support it
            self.madvise(mmap.MADV_FREE)


class _KeptMemory:
    """Pool of blocks for large results; a block is reused once its result is freed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[_Block] = deque()  # freed in any thread, not yet in `_free`
        self._free: list[_Block] = []  # oldest first
        self._in_use = self._most_in_use = 0  # bytes

    def clear(self) -> None:
        """Returns all free blocks to the system."""
        with self._lock:
            self._collect()
            self._free.clear()
            self._most_in_use = self._in_use

    def __len__(self) -> int:
        return len(self._free)

    def take(self, size: int) -> memoryview:
        """Returns `size` uninitialised bytes; they are free again when the view is freed."""
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
        # No lock: the garbage collector may call this while `take` holds it.
        block.offer()
        self._returned.append(block)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._in_use -= len(block)
            self._free.append(block)

    def _fitting(self, size: int) -> _Block:
        """Returns the smallest free block that fits and is at least half used, or a new one.

        A block that is reused for the first time is replaced by one in huge pages. A result that is computed
        only once should not wait for them: the kernel may need 3 s for a gigabyte if it has to move other
        pages. In exchange, offering huge pages to the system and taking them back is free; with small pages
        it takes 7% of the time of a product.
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
    """Whether the memory of large results is kept: PERGRAD_KEEP_MEMORY=0 in the environment disables it."""
    return os.environ.get("PERGRAD_KEEP_MEMORY", "1") != "0"


def is_large(shape: Sequence[int], like: Tensor) -> bool:
    """Whether a result of that shape is large enough for kept memory."""
    if prod(shape) * like.itemsize < _LARGE:  # most are small
        return False
    is_supported = like.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE")  # Linux only
    return is_supported and keeps_memory()


def large_result(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Allocates an uninitialised tensor in kept memory; None where that does not pay."""
    if type(like) is not Tensor or not is_large(shape, like):
        return None
    size = prod(shape) * like.element_size()
    return torch.frombuffer(_MEMORY.take(size), dtype=like.dtype).view(shape)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocates an uninitialised tensor, in kept memory where that pays."""
    kept = large_result(shape, like)
    return like.new_empty(shape) if kept is None else kept


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Allocates zeros, in kept memory where that pays."""
    kept = large_result(shape, like)
    return like.new_zeros(shape) if kept is None else kept.zero_()


# A compiler allocates its own results. These functions are opaque to it, so they can use kept memory.


@operation("products", lambda a, b: a.new_empty(a.shape[0], a.shape[1], b.shape[2]))
def products(a: Tensor, b: Tensor) -> Tensor:
    """A @ b, (n, p, q) @ (n, q, s), in kept memory where that pays."""
    return torch.bmm(a, b, out=large_result((a.shape[0], a.shape[1], b.shape[2]), a))


@operation("product", lambda a, b: a.new_empty(torch.broadcast_shapes(a.shape, b.shape)))
def product(a: Tensor, b: Tensor) -> Tensor:
    """A ⊙ b, of one dtype, in kept memory where that pays."""
    return torch.mul(a, b, out=empty(torch.broadcast_shapes(a.shape, b.shape), a))
