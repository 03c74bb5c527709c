"""A loss function runs recorded: its losses are returned, and its backward fills the quantities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import reduced, run_recorded
from pergrad.errors import PergradError, ScopeError
from pergrad.testing import assert_near, loop_grads


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def test_losses_are_returned_without_a_graph_and_quantities_are_filled() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    grads, journal = pergrad.Grads(), Journal()
    found = run_recorded(model, losses, [x], [grads], Options(), journal=journal)
    assert not found.requires_grad
    assert_near(found, losses(model, x).detach())
    for name, expected in loop_grads(model, losses, x).items():
        assert_near(grads.result[name], expected, name)
        assert journal.rung_of(name) == "rule"


@pytest.mark.parametrize(("reduction", "function"), [("sum", Tensor.sum), ("mean", Tensor.mean)])
def test_losses_of_samples_are_reduced_and_a_scalar_is_taken_as_it_is(
    reduction: Any, function: Callable[[Tensor], Tensor]
) -> None:
    each = torch.rand(5, requires_grad=True)
    assert reduced(each, reduction) == function(each)
    total = each.sum()
    assert reduced(total, reduction) is total


@pytest.mark.parametrize(
    ("loss", "got"), [(torch.ones(2, 3), r"\(2, 3\)"), (3.0, "float"), (None, "NoneType")]
)
def test_anything_but_losses_is_refused_with_what_was_got(loss: Any, got: str) -> None:
    with pytest.raises(PergradError, match=f"or a scalar; got {got}"):
        reduced(loss, "sum")


def test_a_loss_without_a_graph_is_refused_unless_gradients_are_off() -> None:
    with pytest.raises(ScopeError, match="does not depend on any parameter"):
        reduced(torch.ones(3), "sum")
    with torch.no_grad():
        assert reduced(torch.ones(3), "sum") == 3


@pytest.mark.parametrize("had_one", [False, True])
def test_buffers_that_require_grad_keep_the_grad_that_they_had(had_one: bool) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model = Scaled(3, 3)
    model.register_buffer("scale", torch.ones(3, requires_grad=True))
    model.scale.grad = torch.full((3,), 7.0) if had_one else None
    pergrad.norms(model, lambda model, x: model(x).sum(1), torch.randn(4, 3))
    assert (model.scale.grad.tolist() == [7.0] * 3) if had_one else model.scale.grad is None
