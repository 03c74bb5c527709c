"""Computes the reference results by a loop with one backward per sample."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn

from benchmarks.models import Task

BOUND_SAMPLES = 8  # enough to choose the bound; a loop over a large batch would run for each method


def batch_gradients(task: Task, samples: slice) -> dict[str, Tensor]:
    """Returns the gradient of the summed loss of those samples, by plain autograd on them alone."""
    parameters = dict(task.model.named_parameters())
    loss = task.loss(task.model(task.inputs[samples]), task.targets[samples])
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def spread(batch: int, count: int) -> list[int]:
    """Returns at most `count` different samples, from the first to the last of the batch."""
    count = min(count, batch)
    return [i * (batch - 1) // max(count - 1, 1) for i in range(count)]


def norm(tensors: dict[str, Tensor]) -> float:
    """Returns the L2 norm over all tensors."""
    return math.hypot(*(tensor.norm().item() for tensor in tensors.values()))


def clip_bound(task: Task) -> float:
    """Returns a bound that clips about half of the samples: the median norm of a few of them."""
    chosen = spread(task.inputs.shape[0], BOUND_SAMPLES)
    return statistics.median(norm(batch_gradients(task, slice(n, n + 1))) for n in chosen)


def clipped_sum(task: Task, bound: float) -> dict[str, Tensor]:
    """Σ_n min(1, bound / |g_n|) g_n, with one sample's gradient in memory at a time."""
    total: dict[str, Tensor] = {}
    for n in range(task.inputs.shape[0]):
        gradients = batch_gradients(task, slice(n, n + 1))
        size = norm(gradients)
        for name, gradient in gradients.items():
            scaled = gradient * (bound / size if size > bound else 1.0)
            total[name] = total[name].add_(scaled) if name in total else scaled
    return total


def first_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """Returns the first module with parameters of its own, where plain training's backward ends."""
    named = model.named_modules()
    return next((n, m) for n, m in named if next(m.parameters(recurse=False), None) is not None)


def first_layer_gradient(task: Task, samples: slice) -> dict[str, Tensor]:
    """Returns the gradient of the output of the first layer, by the layer's name."""
    name, layer = first_layer(task.model)
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        loss = task.loss(task.model(task.inputs[samples]), task.targets[samples])
    finally:
        handle.remove()
    return {name: torch.autograd.grad(loss, outputs[0])[0]}
