"""Counts the peak of a step's live bytes, by the events of torch's allocators.

Peak RSS was not chosen for the CPU: it keeps what malloc kept from earlier methods and counts code
pages. The allocator's events are exact and repeat from run to run; what they leave out are scratch
buffers inside MKL and oneDNN, which do not pass through torch's allocator.
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
    """The most bytes alive at once, of addresses and bytes in order; bytes are negative where they go.

    What was there before the step, such as the last one's results, makes no room for it.
    """
    sizes: dict[int, int] = {}  # of what the step has allocated
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
    """Within, pergrad takes large results from torch's allocator, where their bytes are counted."""
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
    """The most bytes alive at once in a step, over those alive before it, results included."""
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(step, device)
    return _cpu_peak(step)
