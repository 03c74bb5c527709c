"""Says whether a method's results are those of a loop that runs one backward a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.methods import Quantity
from benchmarks.models import Task

Pairs = Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]  # label, got, expected


def batch_gradients(task: Task, samples: slice) -> dict[str, Tensor]:
    """The gradient of the summed loss of those samples, by plain autograd on them alone."""
    parameters = dict(task.model.named_parameters())
    loss = task.loss(task.model(task.inputs[samples]), task.targets[samples])
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def spread(batch: int, count: int) -> list[int]:
    """At most `count` different samples, from the first to the last of the batch."""
    count = min(count, batch)
    return [i * (batch - 1) // max(count - 1, 1) for i in range(count)]


def _training(task: Task, got: dict[str, Tensor], samples: int) -> Pairs:
    yield "", got, batch_gradients(task, slice(None))


def _grads(task: Task, got: dict[str, Tensor], samples: int) -> Pairs:
    for n in spread(task.inputs.shape[0], samples):
        row = {name: grads[n] for name, grads in got.items()}
        yield f"[{n}]", row, batch_gradients(task, slice(n, n + 1))


ORACLES: dict[Quantity, Callable[[Task, dict[str, Tensor], int], Pairs]] = {
    "training": _training,
    "grads": _grads,
}


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.hypot(*(tensor.norm().item() for tensor in tensors.values()))


def disagreement(
    task: Task, quantity: Quantity, got: dict[str, Tensor], *, tolerance: float, samples: int
) -> str | None:
    """None where |got - expected| <= tolerance * |expected| for each parameter, else what is wrong.

    `task` must be a fresh one, without the hooks of a method. Where a gradient is 0 in exact
    arithmetic (the bias of an attention's keys), |expected| is `tolerance` of the whole gradient.
    Streamed sample by sample: a second (B, *shape) of every parameter may not fit beside the first.
    """
    missing = sorted(dict(task.model.named_parameters()).keys() - got.keys())
    if missing:
        return f"no result for {', '.join(missing)}"
    batch = task.inputs.shape[0]
    for name, result in got.items():
        if quantity == "grads" and result.shape[0] != batch:
            return f"{name}: results of {result.shape[0]} samples, expected {batch}"
    for label, have, want in ORACLES[quantity](task, got, samples):
        floor = tolerance * _norm(want)
        for name, expected in want.items():
            if have[name].shape != expected.shape:
                found = tuple(have[name].shape)
                return f"{name}{label}: shape {found}, expected {tuple(expected.shape)}"
            error = (have[name] - expected).norm().item() / max(expected.norm().item(), floor)
            if not error <= tolerance:
                return f"{name}{label}: relative error {error:.1e}, over {tolerance:.0e}"
    return None
