"""Estimates the batch size that fits into memory, and recognises out-of-memory errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.sharding import is_sharded
from pergrad.runtime.bounds import is_out_of_memory

__all__ = [
    "bytes_kept",
    "fitting_batch_size",
    "free_bytes",
    "is_out_of_memory",
]

_MOST = 1024  # samples; larger batches are no faster, and save less often
_SHARE = 4  # a batch's activations may take 1 / _SHARE of the free memory
_TIMES = 4  # upper bound of peak memory relative to what the forward keeps
# On a CPU larger batches are slower: their tensors leave the cache, and glibc returns blocks of 32 MiB and
# more to the system. Mapping them again took a fifth of an audit of digits.
_KEPT_ON_CPU, _LEAST_ON_CPU = 2**25, 16  # bytes that a forward keeps; samples


def bytes_kept(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Returns the bytes a forward saves for its backward, without parameters and buffers."""

    def storages() -> set[int]:
        tensors = (t for t in (*model.parameters(), *model.buffers()) if not is_sharded(t))
        return {t.untyped_storage().data_ptr() for t in tensors}

    is_whole, before = not any(map(is_sharded, model.parameters())), storages()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The parameters of a sharded model are other tensors while their module runs.
        own = before if is_whole else storages()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def fitting_batch_size(bytes_each: int, free: int, samples: int, *, on_cpu: bool = False) -> int:
    """Returns the largest power of two that fits, at most the number of samples.

    >>> fitting_batch_size(2**20, free=2**30, samples=10_000)
    64
    >>> fitting_batch_size(2**20, free=2**30, samples=10_000, on_cpu=True)
    32
    """
    room = free // _SHARE // max(1, bytes_each * _TIMES)
    if on_cpu:
        room = min(room, max(_LEAST_ON_CPU, _KEPT_ON_CPU // max(1, bytes_each)))
    most = 1 << max(0, room.bit_length() - 1)
    return max(1, min(most, _MOST, samples))


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of the device, or 4 GiB if it is unknown."""
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
