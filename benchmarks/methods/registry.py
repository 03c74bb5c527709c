"""Registers methods: functions from a task to a step that returns its results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.models import Task

Quantity = Literal["training", "floor", "grads", "norms", "clipped"]
BASES: tuple[Quantity, ...] = ("training", "floor")  # shown with every other quantity
TITLES: dict[Quantity, str] = {
    "grads": "full gradients",
    "norms": "norms",
    "clipped": "clipped sum",
}

Step = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class SelfCounted:
    """A step of another runtime, with that runtime's own memory count, which torch does not see."""

    run: Step
    peak_bytes: int  # weights and batch included

    def __call__(self) -> dict[str, Tensor]:
        return self.run()


@dataclass(frozen=True)
class Method:
    """One way to compute one quantity; skipped with a note if the package `requires` is missing.

    `prepare` is called within the context of the run's precision, as the step is. A run can leave `compiled`
    methods out: compiling takes far longer than everything else.
    """

    name: str
    title: str
    quantity: Quantity
    prepare: Callable[[Task], Step]
    requires: str | None = None
    compiled: bool = False
    graphs: bool = False  # uses CUDA graphs: needs a GPU, and holds memory between steps

    def missing(self, device: torch.device) -> str | None:
        """Returns a note if this method cannot run, else None."""
        if self.graphs and device.type != "cuda":
            return "needs a GPU"
        if self.requires is None or importlib.util.find_spec(self.requires) is not None:
            return None
        return f"{self.requires} is not installed"


METHODS: dict[str, Method] = {}
BACKPACK = ("grad_batch", "batch_l2")  # attributes that hold the results of its extensions


def method(
    name: str,
    title: str,
    *,
    quantity: Quantity,
    requires: str | None = None,
    compiled: bool = False,
    graphs: bool = False,
) -> Callable[[Callable[[Task], Step]], Callable[[Task], Step]]:
    """Registers the function as the method `name`; the table calls it `title`."""
    full = f"{TITLES[quantity]}: {title}" if quantity in TITLES else title

    def register(prepare: Callable[[Task], Step]) -> Callable[[Task], Step]:
        if name in METHODS:
            raise ValueError(f"method {name!r} is registered twice")
        METHODS[name] = Method(name, full, quantity, prepare, requires, compiled, graphs)
        return prepare

    return register


def clear(model: nn.Module) -> None:
    """Clears the results that the last step left on the parameters."""
    for parameter in model.parameters():
        parameter.grad = None
        for attribute in BACKPACK:
            vars(parameter).pop(attribute, None)
        if hasattr(parameter, "grad_sample"):
            # Opacus reads the attribute before it fills it, so it must not be deleted.
            parameter.grad_sample = None


def whole_graph(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """Compiles the function with torch.compile as one graph per static shape, or raises.

    All models share the compiled code: after the default limit of 8 versions torch would run the rest
    uncompiled, and by default it would compile the second model with dynamic shapes.
    """
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)
