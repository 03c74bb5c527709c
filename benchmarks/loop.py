"""What a loop that runs one backward a sample gives: what every method is compared with."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn

from benchmarks.models import Task

BOUND_SAMPLES = (
    8  # enough to place the bound; a loop over a large batch would be run for each method
)


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


def norm(tensors: dict[str, Tensor]) -> float:
    """The L2 norm of all of them together."""
    return math.hypot(*(tensor.norm().item() for tensor in tensors.values()))


def clip_bound(task: Task) -> float:
    """A bound that clips about half of the samples: the median norm of a few of them."""
    chosen = spread(task.inputs.shape[0], BOUND_SAMPLES)
    return statistics.median(norm(batch_gradients(task, slice(n, n + 1))) for n in chosen)


def clipped_sum(task: Task, bound: float) -> dict[str, Tensor]:
    """Σ_n min(1, bound / |g_n|) g_n; one sample's gradient is held at a time."""
    total: dict[str, Tensor] = {}
    for n in range(task.inputs.shape[0]):
        gradients = batch_gradients(task, slice(n, n + 1))
        size = norm(gradients)
        for name, gradient in gradients.items():
            scaled = gradient * (bound / size if size > bound else 1.0)
            total[name] = total[name].add_(scaled) if name in total else scaled
    return total


def first_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """The first module with parameters of its own: what plain training's backward ends at."""
    named = model.named_modules()
    return next((n, m) for n, m in named if next(m.parameters(recurse=False), None) is not None)


def first_layer_gradient(task: Task, samples: slice) -> dict[str, Tensor]:
    """The gradient at the output of the first layer, by its name."""
    name, layer = first_layer(task.model)
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        loss = task.loss(task.model(task.inputs[samples]), task.targets[samples])
    finally:
        handle.remove()
    return {name: torch.autograd.grad(loss, outputs[0])[0]}
