"""Bounds the memory that a step may use beside its results."""

from __future__ import annotations

import os

import torch

__all__ = ["ENOUGH", "ENOUGH_ON_GPU", "default_bound"]

# Larger pieces are no faster. On a GPU each piece costs a launch, so pieces are larger. Deferred work is
# batched to save Python overhead, so its bound is larger still.
ENOUGH, ENOUGH_ON_GPU, ENOUGH_TO_DEFER = 32 * 2**20, 256 * 2**20, 2**30


def default_bound(device: torch.device, *, defers: bool = False) -> int:
    """Returns the bytes that a reduction may use beside its result: at most a sixteenth of free memory.

    With `defers`, rules are deferred to run many at once, and the bound is larger.
    """
    if device.type == "cuda":
        enough = ENOUGH_TO_DEFER if defers else ENOUGH_ON_GPU
        free = torch.cuda.mem_get_info(device)[0]
        if free < 16 * enough:  # only then: the allocator's statistics take a millisecond
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(free // 16, enough)
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(free // 16, ENOUGH)
    return ENOUGH
