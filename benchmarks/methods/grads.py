"""What is timed: one function a method, from a task to a step that returns what it computed.

To add a peer or a variant, write one function under ``@method``; a new quantity needs its title
here and its oracle in ``benchmarks.check`` too. A step leaves its results on the parameters'
``grad`` or ``grad_sample`` or nowhere: both are cleared between steps, outside of the timing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as expanded_weights_call

from benchmarks.models import Task

Quantity = Literal["training", "grads"]
TITLES: dict[Quantity, str] = {"training": "", "grads": "full gradients: "}

Step = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Method:
    """One way to one quantity; skipped with a note where the package `requires` is missing."""

    name: str
    title: str
    quantity: Quantity
    prepare: Callable[[Task], Step]
    requires: str | None = None

    def missing(self) -> str | None:
        """The note to show where this method cannot be run, else None."""
        if self.requires is None or importlib.util.find_spec(self.requires) is not None:
            return None
        return f"{self.requires} is not installed"


METHODS: dict[str, Method] = {}


def method(
    name: str, title: str, *, quantity: Quantity, requires: str | None = None
) -> Callable[[Callable[[Task], Step]], Callable[[Task], Step]]:
    """Registers the function as the method `name`; the table calls it `title`."""

    def register(prepare: Callable[[Task], Step]) -> Callable[[Task], Step]:
        if name in METHODS:
            raise ValueError(f"method {name!r} is registered twice")
        METHODS[name] = Method(name, TITLES[quantity] + title, quantity, prepare, requires)
        return prepare

    return register


def clear(model: nn.Module) -> None:
    """Drop what the last step left on the parameters."""
    for parameter in model.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_sample"):
            # Opacus reads the attribute before it is filled, so it may not be deleted
            parameter.grad_sample = None


def _grad_samples(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.grad_sample for name, p in named}  # type: ignore[attr-defined]


@method("plain", "plain", quantity="training")
def plain(task: Task) -> Step:
    def step() -> dict[str, Tensor]:
        task.loss(task.model(task.inputs), task.targets).backward()
        return {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}

    return step


@method("pergrad", "pergrad", quantity="grads", requires="pergrad")
def pergrad_call(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def step() -> dict[str, Tensor]:
        call = pergrad.call_for_per_sample_grads(task.model)
        task.loss(call(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step


@method("pergrad-record", "pergrad.record", quantity="grads", requires="pergrad")
def pergrad_record(task: Task) -> Step:
    pergrad = importlib.import_module("pergrad")

    def step() -> dict[str, Tensor]:
        grads = pergrad.Grads()
        with pergrad.record(task.model, grads):
            task.loss(task.model(task.inputs), task.targets).backward()
        return grads.result

    return step


@method("expanded-weights", "torch ExpandedWeights", quantity="grads")
def expanded_weights(task: Task) -> Step:
    def step() -> dict[str, Tensor]:
        call = expanded_weights_call(task.model, loss_reduction="sum")
        task.loss(call(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step


@method("vmap", "vmap(grad)", quantity="grads")
def vmap_grad(task: Task) -> Step:
    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(task.model, weights, (x.unsqueeze(0),))
        return task.loss(logits, y.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    # the CPU's fused attention has no batching rule and would run as a loop; measured as fast
    on_cpu = task.inputs.device.type == "cpu"

    def step() -> dict[str, Tensor]:
        weights = {name: p.detach() for name, p in task.model.named_parameters()}
        with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            return per_sample(weights, task.inputs, task.targets)

    return step


@method("opacus", "Opacus hooks", quantity="grads", requires="opacus")
def opacus_hooks(task: Task) -> Step:
    extra = importlib.import_module("opacus.grad_sample")

    wrapped = extra.GradSampleModule(task.model, loss_reduction="sum")

    def step() -> dict[str, Tensor]:
        task.loss(wrapped(task.inputs), task.targets).backward()
        return _grad_samples(task.model)

    return step
