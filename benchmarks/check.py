"""Compares a method's results with a loop that runs one backward per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.loop import (
    batch_gradients,
    clip_bound,
    clipped_sum,
    first_layer_gradient,
    norm,
    spread,
)
from benchmarks.methods import Quantity
from benchmarks.models import Task

Pairs = Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]  # label, got, expected


def _training(task: Task, got: dict[str, Tensor], samples: int) -> Pairs:
    yield "", got, batch_gradients(task, slice(None))


def _rows(
    expected: Callable[[Task, int], dict[str, Tensor]],
) -> Callable[[Task, dict[str, Tensor], int], Pairs]:
    """Returns an oracle for results with a row per sample: compares a few samples, first to last."""

    def oracle(task: Task, got: dict[str, Tensor], samples: int) -> Pairs:
        for n in spread(task.inputs.shape[0], samples):
            yield f"[{n}]", {name: rows[n] for name, rows in got.items()}, expected(task, n)

    return oracle


def _floor(task: Task, n: int) -> dict[str, Tensor]:
    gradients = first_layer_gradient(task, slice(n, n + 1))
    return {name: gradient[0] for name, gradient in gradients.items()}


def _grads(task: Task, n: int) -> dict[str, Tensor]:
    return batch_gradients(task, slice(n, n + 1))


def _norms(task: Task, n: int) -> dict[str, Tensor]:
    return {"norms": task.inputs.new_tensor(norm(_grads(task, n)), dtype=torch.float64)}


def _clipped(task: Task, got: dict[str, Tensor], samples: int) -> Pairs:
    yield "", got, clipped_sum(task, clip_bound(task))


ORACLES: dict[Quantity, Callable[[Task, dict[str, Tensor], int], Pairs]] = {
    "training": _training,
    "floor": _rows(_floor),
    "grads": _rows(_grads),
    "norms": _rows(_norms),
    "clipped": _clipped,
}
PER_SAMPLE: tuple[Quantity, ...] = ("floor", "grads", "norms")


def disagreement(
    task: Task, quantity: Quantity, got: dict[str, Tensor], *, tolerance: float, samples: int
) -> str | None:
    """Returns None if |got - expected| <= tolerance * |expected| for each result, else the first error.

    `task` must be fresh, without the hooks of a method. If a gradient is 0 in exact arithmetic (the bias of
    an attention's keys), |expected| is `tolerance` of the whole gradient. The comparison streams sample by
    sample: a second (B, *shape) of every parameter may not fit into memory.
    """
    batch = task.inputs.shape[0]
    for name, result in got.items():
        if quantity in PER_SAMPLE and result.shape[0] != batch:
            return f"{name}: results of {result.shape[0]} samples, expected {batch}"
    for label, have, want in ORACLES[quantity](task, got, samples):
        missing = sorted(want.keys() - have.keys())
        if missing:
            return f"no result for {', '.join(missing)}"
        floor = tolerance * norm(want)
        for name, expected in want.items():
            if have[name].shape != expected.shape:
                found = tuple(have[name].shape)
                return f"{name}{label}: shape {found}, expected {tuple(expected.shape)}"
            error = (have[name] - expected).norm().item() / max(expected.norm().item(), floor)
            if not error <= tolerance:
                return f"{name}{label}: relative error {error:.1e}, over {tolerance:.0e}"
    return None
