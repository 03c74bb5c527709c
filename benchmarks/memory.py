"""Counts the peak of a step's live bytes: CUDA by the allocator's own counter, CPU by its events.

Peak RSS was not chosen for the CPU: it keeps what malloc kept from earlier methods and counts code
pages. The allocator's events are exact and repeat from run to run; what they leave out are scratch
buffers inside MKL and oneDNN, which do not pass through torch's allocator.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import Step


def _cuda_peak(step: Step, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = step()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _torchs_own_memory() -> AbstractContextManager[object]:
    """Within, pergrad takes large results from torch's allocator, where their bytes are counted."""
    if "pergrad" not in sys.modules:
        return nullcontext()
    return patch("pergrad.factors.allocation._LARGE", sys.maxsize)


def _cpu_peak(step: Step) -> int:
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else a line on stderr for every start and stop
    with (
        _torchs_own_memory(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = step()
    del result
    kineto = profiler.profiler.kineto_results
    changes, pending = [], list(kineto.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    sizes: dict[int, int] = {}  # of what the step has allocated, by address
    live = peak = 0
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            sizes[address] = size
            live += size
            peak = max(peak, live)
        else:  # what was there before the step, such as the last one's results, makes no room for it
            live -= sizes.pop(address, 0)
    return peak


def step_peak_bytes(step: Step, device: torch.device) -> int:
    """The most bytes alive at once in a step, over those alive before it, results included."""
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(step, device)
    return _cpu_peak(step)
