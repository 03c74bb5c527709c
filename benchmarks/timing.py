"""Order-randomised rounds: what the machine does to one method it does to all of them.

A round visits the methods on a model in a fresh random order: a method and its plain base are then
seconds apart, and no method always follows the same other. A visit is one step to warm up and `steps`
timed ones, of which the median counts. A method's ratio is the median over the rounds of its time over
plain's time in the same round, so that a machine which slows down for a while slows both; the
interquartile range says how much it moved.

On a GPU the timed steps of a visit follow one another without waiting, as in training: Python then runs
ahead of the device, and what is measured is the slower of the two. Their mean is the visit's one figure.
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
    """Within, collecting garbage passes over what was there before: torch's own objects take 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def orders(methods: Sequence[str], *, rounds: int, seed: int) -> Iterator[list[str]]:
    """The methods of each round, each of them once."""
    generator = random.Random(seed)
    for _ in range(rounds):
        yield generator.sample(methods, len(methods))


def _release_freed_memory(device: torch.device) -> None:
    """Each visit starts from the same heap, whatever the last method has left free in it.

    On the CPU that is worth up to 10% either way: what fits into pages that are there need not be mapped.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def visit(
    step: Step, clear: Callable[[], None], *, steps: int, device: torch.device
) -> list[float]:
    """Seconds of a step, by the timed ones; the first of all warms up and is not among them."""
    gc.collect()
    _release_freed_memory(device)  # the warm-up step allocates anew what this method needs
    _once(step, clear)
    if device.type == "cuda":
        return [_cuda_seconds(step, clear, steps, device)]
    return [_once(step, clear) for _ in range(steps)]


def _once(step: Step, clear: Callable[[], None]) -> float:
    """Clearing the results is outside of the timing."""
    start = time.perf_counter()
    result = step()
    seconds = time.perf_counter() - start
    del result
    clear()
    return seconds


def _cuda_seconds(step: Step, clear: Callable[[], None], steps: int, device: torch.device) -> float:
    """The mean of steps in a row; clearing is host work between them, which the device need not wait for."""
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
    """The median and the interquartile range."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (low, high)
