"""Counts the peak of a step's live bytes from the events of torch's allocators.

Peak RSS is not used on the CPU: it includes memory that malloc kept from earlier methods, and code pages. The
allocator's events are exact and reproducible. They miss the scratch buffers of MKL and oneDNN, which do not
use torch's allocator.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import Step


def _peak(changes: Iterable[tuple[int, int]]) -> int:
    """Returns the peak of live bytes from (address, bytes) events in order; bytes are negative for a free.

    Freeing memory from before the step, such as the last step's results, does not count.
    """
    sizes: dict[int, int] = {}  # of blocks that the step has allocated
    live = peak = 0
    for address, size in changes:
        if size > 0:
            sizes[address] = size
            live += size
            peak = max(peak, live)
        else:
            live -= sizes.pop(address, 0)
    return peak


_SIGNS = {"alloc": 1, "free_requested": -1}  # of the events of the CUDA allocator


def _cuda_peak(step: Step, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.memory._record_memory_history(context=None, clear_history=True)
    try:
        result = step()
        torch.cuda.synchronize(device)
        events = torch.cuda.memory._snapshot(device)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    del result
    return _peak(
        (event["addr"], _SIGNS[event["action"]] * event["size"])
        for event in chain.from_iterable(events)
        if event["action"] in _SIGNS
    )


def _torchs_own_memory() -> AbstractContextManager[object]:
    """Makes pergrad allocate large results with torch's allocator, where their bytes are counted."""
    if "pergrad" not in sys.modules:
        return nullcontext()
    return patch("pergrad.runtime.allocation._LARGE", sys.maxsize)


def _cpu_peak(step: Step) -> int:
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else a line on stderr for every start and stop
    with (
        _torchs_own_memory(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
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
    changes.sort(key=lambda change: change[0])
    return _peak((address, size) for _, address, size in changes)


def step_peak_bytes(step: Step, device: torch.device) -> int:
    """Returns the peak of live bytes in a step above those alive before it, results included."""
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(step, device)
    return _cpu_peak(step)
