"""Bounds the memory that a step may use beside its results, and recognises that it ran out."""

from __future__ import annotations

import os
import time

import torch

__all__ = [
    "ENOUGH",
    "ENOUGH_ON_GPU",
    "bound_of_trace",
    "default_bound",
    "is_out_of_memory",
    "share_of_free_memory",
]

# Larger pieces are no faster. On a GPU each piece costs a launch, and batches of work save Python overhead.
ENOUGH, ENOUGH_ON_GPU = 32 * 2**20, 2**30
_HOLDS = 0.05  # seconds: as long as a reading of the host's free memory is taken for the present
_host = 0.0, 0  # until when the last reading holds, and the bytes


def default_bound(device: torch.device) -> int:
    """Returns the bytes that a reduction may use beside its result: at most a sixteenth of free memory."""
    enough = ENOUGH_ON_GPU if device.type == "cuda" else ENOUGH
    return min(share_of_free_memory(device, 16, enough), enough)


def bound_of_trace(device: torch.device) -> int:
    """Returns the bound of a step that is traced once and runs many times.

    On a GPU it is at least a 128th of the whole memory: what happens to be free during the trace does not
    matter later, and a step traced while other processes held the memory would keep its many small launches.
    """
    bound = default_bound(device)
    if device.type != "cuda":
        return bound
    _, whole = torch.cuda.mem_get_info(device)
    return max(bound, min(whole // 128, ENOUGH_ON_GPU))


def share_of_free_memory(device: torch.device, parts: int, enough: int | None = None) -> int:
    """Returns one of so many parts of the free memory in bytes; it may be less if it is `enough`."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if enough is None or free < parts * enough:  # else not: statistics take a millisecond
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free // parts)
    return _free_on_host() // parts


def _free_on_host() -> int:
    """Returns the free memory of the host; small steps would read it thousands of times a second."""
    global _host
    now = time.monotonic()
    if now >= _host[0]:
        free = 16 * ENOUGH
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        _host = now + _HOLDS, free
    return _host[1]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a smaller batch may avoid the error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
