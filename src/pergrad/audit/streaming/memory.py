"""How many samples fit: a first guess from what the forward keeps of one, and when to take fewer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "bytes_kept",
    "fitting_batch_size",
    "free_bytes",
    "is_out_of_memory",
]

_MOST = 1024  # samples; larger batches are no faster, and make the steps between two saves longer
_SHARE = 4  # the part of the free memory that one batch's activations may take
_TIMES = 4  # what gradients, copies and pieces take at most beside what the forward keeps


def is_out_of_memory(error: BaseException) -> bool:
    """Whether fewer samples at a time may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def bytes_kept(model: nn.Module, forward: Callable[[], Any]) -> int:
    """What a forward keeps for its backward, without the model's own tensors."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def fitting_batch_size(bytes_each: int, free: int, samples: int) -> int:
    """A power of two, or all samples where they are fewer.

    >>> fitting_batch_size(2**20, free=2**30, samples=10_000)
    64
    """
    room = free // _SHARE // max(1, bytes_each * _TIMES)
    most = 1 << max(0, room.bit_length() - 1)
    return max(1, min(most, _MOST, samples))


def free_bytes(device: torch.device) -> int:
    """What is free on the device, as far as it can be known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    info = Path("/proc/meminfo")
    if info.exists():
        lines = (line.split() for line in info.read_text().splitlines())
        found = [int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"]
        if found:
            return found[0]
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 2**30
