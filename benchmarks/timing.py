"""Times methods in rounds of random order, so that changes of the machine's speed affect all of them.

A round visits the methods on a model in a fresh random order: a method and its plain base are then seconds
apart, and no method always follows the same other one. A visit is one warm-up step and `steps` timed ones;
their median counts. A method's ratio is the median over the rounds of its time over plain's time in the same
round, so that a slow phase of the machine slows both. The interquartile range shows the spread.

On a GPU the timed steps of a visit run without synchronizing between them, as in training: Python runs ahead
of the device, and the slower of the two is measured. Their mean is the visit's figure.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.methods import Step


@contextmanager
def settled_heap() -> Iterator[None]:
    """Excludes existing objects from garbage collection within the block: torch's own take 0.1 s."""
    is_settled = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not is_settled:
            gc.unfreeze()


def orders(methods: Sequence[str], *, rounds: int, seed: int) -> Iterator[list[str]]:
    """Yields the methods of each round in random order."""
    generator = random.Random(seed)
    for _ in range(rounds):
        yield generator.sample(methods, len(methods))


def _release_freed_memory(device: torch.device) -> None:
    """Makes each visit start from the same heap, whatever the last method left free in it.

    On the CPU this matters by up to 10% either way: memory that is already mapped need not be mapped again.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def visit(
    step: Step, clear: Callable[[], None], *, steps: int, device: torch.device
) -> list[float]:
    """Returns the seconds of a step over the timed steps, after one warm-up step."""
    gc.collect()
    _release_freed_memory(device)  # the warm-up step allocates the memory of this method again
    _once(step, clear)
    if device.type == "cuda":
        return [_cuda_seconds(step, clear, steps, device)]
    return [_once(step, clear) for _ in range(steps)]


def _once(step: Step, clear: Callable[[], None]) -> float:
    """Times one step, without clearing the results."""
    start = time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    del result
    clear()
    return seconds


def _cuda_seconds(step: Step, clear: Callable[[], None], steps: int, device: torch.device) -> float:
    """Returns the mean of consecutive steps; clearing between them is host work that overlaps the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(steps):
        step()
        clear()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / steps


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Returns the median and the interquartile range."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (low, high)
