"""Compares any model with the loop over samples, by both entry points; wraps formulas as models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pergrad
from pergrad.testing import assert_near, loop_grads

__all__ = [
    "Case",
    "Formula",
    "assert_all_near",
    "assert_exact",
    "numbers",
    "of",
    "state_of",
    "total",
]


class Formula(nn.Module):
    """A function of the module itself, whose parts are given by name, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part.clone()) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def of(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    """A batch of random inputs, each sample of the given shapes."""
    return lambda size: tuple(numbers(size, *shape) for shape in shapes)


def total(output: Any) -> Tensor:
    """A scalar that every element of every output counts in differently, whatever their shapes."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return sum(((t + 0.5) ** 3 / 3).sum() for t in tensors)


def _plain_call(model: Callable[..., Any], *batch: Any) -> Any:
    return model(*batch)


@dataclass(frozen=True)
class Case:
    """A model, its batch of a given size, samples first, and how the model is called on it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    call: Callable[..., Any] = _plain_call
    batch_dim: int = 0  # where `call` gets and the model takes the samples
    tell_size: bool = False  # whether `batch_size` must be passed


def assert_exact(case: Case, size: int) -> None:
    """Per-sample gradients by `grads` and by `call_for_per_sample_grads` are those of the loop."""
    torch.manual_seed(0)
    model = case.build().double()
    batch = [t.movedim(0, case.batch_dim) for t in case.batch(size)]
    before = state_of(model)

    def loss(model: Callable[..., Any], *batch: Tensor) -> Tensor:
        return total(case.call(model, *batch))

    expected = loop_grads(model, loss, *batch, batch_dim=case.batch_dim)
    options: dict[str, Any] = {
        "batch_first": case.batch_dim == 0,
        "batch_size": size if case.tell_size else None,
    }
    assert_all_near(pergrad.grads(model, loss, *batch, **options), expected)

    loss(pergrad.call_for_per_sample_grads(model, **options), *batch).backward()
    rows = {
        name: p.__dict__.pop("grad_sample")
        for name, p in model.named_parameters()
        if hasattr(p, "grad_sample")
    }
    unreached = {name: torch.zeros_like(rows) for name, rows in expected.items()}
    assert_all_near({**unreached, **rows}, expected)
    assert state_of(model) == before


def assert_all_near(rows: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert rows.keys() == expected.keys()
    for name in expected:
        assert_near(rows[name], expected[name], name)


def state_of(model: nn.Module) -> list[Any]:
    """All that an engine may forget on a model: attributes of tensors, hooks, gradients."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        *((name, sorted(vars(t)), len(t._backward_hooks or ()), t.grad) for name, t in tensors),
        *((len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()),
    ]
