"""Defines the baselines: plain training, and input gradients, the least that any exact method must do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loop import first_layer
from benchmarks.methods.registry import Step, method, whole_graph
from benchmarks.models import Task


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@method("plain", "plain", quantity="training")
def plain(task: Task) -> Step:
    def step() -> dict[str, Tensor]:
        task.loss(task.model(task.inputs), task.targets).backward()
        return _gradients(task.model)

    return step


def _compiled(task: Task, mode: str | None = None) -> Step:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(task.model(x), y)

    run = whole_graph(loss, mode)

    def step() -> dict[str, Tensor]:
        run(task.inputs, task.targets).backward()
        return _gradients(task.model)

    return step


@method("plain-compiled", "plain, torch.compile", quantity="training", compiled=True)
def plain_compiled(task: Task) -> Step:
    return _compiled(task)


@method(
    "plain-graphs",
    "plain, torch.compile, CUDA graphs",
    quantity="training",
    compiled=True,
    graphs=True,
)
def plain_graphs(task: Task) -> Step:
    return _compiled(task, mode="reduce-overhead")


@method("inputs", "input gradients only", quantity="floor")
def input_gradients(task: Task) -> Step:
    """Does all of plain training except the weights' gradients: from the loss to the first layer."""
    task.model.requires_grad_(False)
    name, layer = first_layer(task.model)
    outputs: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append(output.requires_grad_())

    layer.register_forward_hook(hook)

    def step() -> dict[str, Tensor]:
        task.loss(task.model(task.inputs), task.targets).backward()
        gradient = outputs.pop().grad
        assert gradient is not None
        return {name: gradient}

    return step


@method("inputs-compiled", "input gradients only, torch.compile", quantity="floor", compiled=True)
def input_gradients_compiled(task: Task) -> Step:
    """Does so for compiled training; takes the gradient of zeros added to the first layer's output."""
    task.model.requires_grad_(False)
    name, layer = first_layer(task.model)
    shapes: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, __, output: shapes.append(output))
    with torch.no_grad():
        task.model(task.inputs)
    handle.remove()
    zeros = torch.zeros_like(shapes.pop()).requires_grad_()
    layer.register_forward_hook(lambda _, __, output: output + zeros)

    @whole_graph
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return task.loss(task.model(x), y)

    def step() -> dict[str, Tensor]:
        (gradient,) = torch.autograd.grad(loss(task.inputs, task.targets), zeros)
        return {name: gradient}

    return step
