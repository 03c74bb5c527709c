"""The table of methods: a function from a task to a step that returns what it computed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.models import Task

Quantity = Literal["training", "floor", "grads", "norms", "clipped"]
BASES: tuple[Quantity, ...] = ("training", "floor")  # beside every other quantity
TITLES: dict[Quantity, str] = {
    "grads": "full gradients",
    "norms": "norms",
    "clipped": "clipped sum",
}

Step = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class SelfCounted:
    """A step of a runtime whose memory torch does not see, with that runtime's own count of it."""

    run: Step
    peak_bytes: int  # weights and batch included

    def __call__(self) -> dict[str, Tensor]:
        return self.run()


@dataclass(frozen=True)
class Method:
    """One way to one quantity; skipped with a note where the package `requires` is missing.

    `prepare` is called as the step is: within the context of the run's precision. A `compiled` one can be
    left out of a run: to compile takes far longer than everything else.
    """

    name: str
    title: str
    quantity: Quantity
    prepare: Callable[[Task], Step]
    requires: str | None = None
    compiled: bool = False
    graphs: bool = False  # by CUDA graphs: on a GPU alone, and its memory is not that of one step

    def missing(self, device: torch.device) -> str | None:
        """The note to show where this method cannot be run, else None."""
        if self.graphs and device.type != "cuda":
            return "needs a GPU"
        if self.requires is None or importlib.util.find_spec(self.requires) is not None:
            return None
        return f"{self.requires} is not installed"


METHODS: dict[str, Method] = {}
BACKPACK = ("grad_batch", "batch_l2")  # where its extensions leave their results


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
    """Drop what the last step left on the parameters."""
    for parameter in model.parameters():
        parameter.grad = None
        for attribute in BACKPACK:
            vars(parameter).pop(attribute, None)
        if hasattr(parameter, "grad_sample"):
            # Opacus reads the attribute before it is filled, so it may not be deleted
            parameter.grad_sample = None


def whole_graph(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """The function by torch.compile, each shape for itself and whole, or an error.

    All models share the code that is compiled: past the default limit of 8 versions of it torch would run the
    rest uncompiled, and by default it would compile the second model's for sizes that vary.
    """
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)
