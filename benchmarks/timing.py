"""Order-randomised rounds: what the machine does to one method it does to all of them.

A round visits the models in a fresh random order and, on each, the methods in a fresh random order:
a method and its plain base are then seconds apart, and no method always follows the same other. A
visit is one step to warm up and `steps` timed ones, of which the median counts. A method's ratio is
the median over the rounds of its time over plain's time in the same round, so that a machine which
slows down for a while slows both; the interquartile range says how much it moved.
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


def orders(
    models: Sequence[str], methods: Sequence[str], *, rounds: int, seed: int
) -> Iterator[tuple[int, str, str]]:
    """(round, model, method), each pair once a round."""
    generator = random.Random(seed)
    for number in range(rounds):
        for model in generator.sample(models, len(models)):
            for method in generator.sample(methods, len(methods)):
                yield number, model, method


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    """Seconds of each timed step; clearing the results is outside of the timing."""
    gc.collect()
    _release_freed_memory(device)  # the warm-up step allocates anew what this method needs
    times = []
    for number in range(steps + 1):
        _synchronize(device)
        start = time.perf_counter()
        result = step()
        _synchronize(device)
        if number > 0:
            times.append(time.perf_counter() - start)
        del result
        clear()
    return times


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median and the interquartile range."""
    if len(values) == 1:
        return values[0], (values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (low, high)
