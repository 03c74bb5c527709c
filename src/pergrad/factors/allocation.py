"""Memory for large results on the CPU, where first touching the pages costs more than the arithmetic."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["large_result"]

# Above this, glibc maps every allocation afresh, and the kernel hands it out in 4 KiB pages: a (64, 512,
# 512) float32 result took 16 ms, 14 of them for the pages. With huge pages it takes 4 ms.
_FRESHLY_MAPPED = 32 * 2**20


def large_result(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """An uninitialised tensor in huge pages, where that pays, to write a result to; else None."""
    size = prod(shape) * like.element_size()
    if size < _FRESHLY_MAPPED:
        return None
    is_plain = type(like) is Tensor and like.device.type == "cpu"
    if not is_plain or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them: ordinary pages then, the same result
        return None
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
