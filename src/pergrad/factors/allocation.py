"""Memory for large results on the CPU, where first touching the pages costs more than the arithmetic."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["large_result"]

# Above this, glibc maps every allocation afresh, and the kernel hands it out in 4 KiB pages: a (64, 512,
# 512) float32 result took 16 ms, 14 of them for the pages. With huge pages it takes 4 ms.
_FRESHLY_MAPPED = 32 * 2**20

# Where memory is in small pieces, the kernel first moves others' pages to make room for a huge one, which
# takes longer than small pages would: a few pages show whether it does, and then a while goes without.
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14 and later; `mmap` has no name for it
_TRIED = 8 * 2**20  # bytes
_SLOW = _TRIED / 2e9  # seconds; huge pages at hand come at 8 GB/s, small ones at 3 to 5
_RESTS = 20  # results


class _HugePages:
    """Whether huge pages are to be had at present."""

    def __init__(self) -> None:
        self._rests = 0

    def are_due(self) -> bool:
        self._rests = max(0, self._rests - 1)
        return self._rests == 0

    def take(self, pages: mmap.mmap) -> bool:
        """Have the mapping in huge pages, unless the kernel has none; False where they are slow to get."""
        pages.madvise(mmap.MADV_HUGEPAGE)
        begin = time.perf_counter()
        pages.madvise(_POPULATE_WRITE, 0, min(_TRIED, len(pages)))
        if time.perf_counter() - begin < _SLOW:
            return True
        self._rests = _RESTS
        return False


_HUGE_PAGES = _HugePages()


def large_result(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """An uninitialised tensor in huge pages, where that pays, to write a result to; else None."""
    size = prod(shape) * like.element_size()
    if size < _FRESHLY_MAPPED:
        return None
    is_plain = type(like) is Tensor and like.device.type == "cpu"
    if not is_plain or not hasattr(mmap, "MADV_HUGEPAGE") or not _HUGE_PAGES.are_due():
        return None
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        if not _HUGE_PAGES.take(pages):
            return None
    except OSError:  # a kernel without them: ordinary pages then, the same result
        return None
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
