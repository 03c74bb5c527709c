"""Judges small models that break what an engine may assume: their gradients are exact, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

import pergrad
from pergrad.testing import assert_near

__all__ = ["Case", "Cases", "Model", "exact_or_refused", "rows_of_losses", "squares"]

Verdict: TypeAlias = Literal["exact", "refused"]
Loss: TypeAlias = Callable[..., Tensor]


class Model(nn.Module):
    """A function of two linear layers `a` and `b`, of a weight `w`, and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.w = nn.Parameter(torch.randn(3, 3))
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).flatten(1).square().sum(1)


def _rows(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 3),)


@dataclass(frozen=True)
class Case:
    """A function of a model and its batch, and whether its gradients are exact or refused."""

    function: Callable[..., Tensor]
    verdict: Verdict
    size: int = 4
    batch: Callable[[int], tuple[Tensor, ...]] = _rows
    loss_fn: Loss = squares
    parts: Callable[[], dict[str, Any]] = dict
    prepare: Callable[..., Any] | None = None  # called with the model and the batch

    def made(self) -> tuple[Model, tuple[Tensor, ...]]:
        """Returns the model and its batch, the same each time."""
        torch.manual_seed(0)
        model, batch = Model(self.function, **self.parts()), self.batch(self.size)
        if self.prepare is not None:
            self.prepare(model, *batch)
        return model, batch


class Cases(dict[str, Case]):
    """Collects the cases of one class by the names of their functions."""

    def exact(self, **options: Any) -> Callable[..., Any]:
        return lambda function: self._add(Case(function, "exact", **options))

    def refused(self, **options: Any) -> Callable[..., Any]:
        return lambda function: self._add(Case(function, "refused", **options))

    def _add(self, case: Case) -> Callable[..., Tensor]:
        name = case.function.__name__
        assert name not in self
        self[name] = case
        return case.function


def rows_of_losses(
    model: nn.Module, loss_fn: Loss, *batch: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the losses and ∂losses[n]/∂w for each n: one backward pass each, by plain autograd."""
    named = dict(model.named_parameters())
    losses = loss_fn(model, *batch)
    rows = [
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in losses
    ]
    return losses.detach(), {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(named.items())
    }


def exact_or_refused(
    made: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], loss_fn: Loss = squares
) -> Verdict:
    """Compares gradients and norms with plain autograd; fails if they are wrong, or the model has changed."""
    model, batch = made()
    torch.manual_seed(1)
    _, expected = rows_of_losses(model, loss_fn, *batch)
    lengths = [rows.flatten(1).abs().square().sum(1) for rows in expected.values()]

    grads = _answered(pergrad.grads, made, loss_fn)
    norms = _answered(pergrad.norms, made, loss_fn)
    assert (grads is None) == (norms is None), "refused by one of `grads` and `norms` only"
    if grads is None:
        return "refused"
    assert grads.keys() == expected.keys()
    for name, rows in expected.items():
        assert_near(_real(grads[name]), _real(rows), name)
    assert_near(norms, torch.stack(lengths).sum(0).sqrt(), "norms")
    return "exact"


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _answered(
    entry: Callable[..., Any],
    made: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]],
    loss_fn: Loss,
) -> Any:
    """Returns the answer of an entry point; None if it is refused and nothing has changed."""
    model, batch = made()
    modules, tensors = [*model.modules()], [*model.parameters(), *model.buffers()]
    before, values = _marks(modules, tensors), [t.detach().clone() for t in tensors]
    torch.manual_seed(1)
    answer, message = None, "answered"
    try:
        answer = entry(model, loss_fn, *batch)
    except pergrad.PergradError as error:
        message = str(error).strip()
    assert message, "a refusal without a reason"
    assert _marks(modules, tensors) == before, "a hook, an attribute or a gradient is left"
    for t, value in zip(tensors, values, strict=True):
        assert torch.equal(t, value), "a parameter or buffer has changed"
    return answer


def _marks(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[Any]:
    """Lists what a recording may leave behind: hooks of modules; attributes, gradients, hooks of tensors."""
    return [
        *([*m._forward_pre_hooks, *m._forward_hooks, *m._backward_hooks] for m in modules),
        *((sorted(vars(t)), t.grad is None, [*(t._backward_hooks or ())]) for t in tensors),
    ]
