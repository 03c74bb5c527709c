"""Behind the gate a module's graph is one node, and its backward is recorded from outside."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.recording.gate import run_gated
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import Recording
from pergrad.errors import ScopeError
from pergrad.testing import assert_near, loop_grads

SIZE = 3


class Several(nn.Module):
    """Several outputs: of one no gradient is asked, one is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 2).double()

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.map(x if scale is None else x * scale)
        return {"y": y, "squares": (y**2,), "argmax": y.argmax(1), "name": "several"}


def gated(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, pergrad.Grads]:
    grads = pergrad.Grads()
    return run_gated(model, Recording(model, [grads], Options()), args, kwargs), grads


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape, dtype=torch.float64)


def test_outputs_are_those_of_the_module_and_come_from_one_node() -> None:
    model, x = Several(), numbers(SIZE, 4)
    output, _ = gated(model, x)
    plain = model(x)
    assert output.keys() == plain.keys()
    assert output["name"] == "several"
    assert torch.equal(output["argmax"], plain["argmax"])
    assert_near(output["y"], plain["y"])
    assert output["y"].grad_fn is output["squares"][0].grad_fn
    assert not output["argmax"].requires_grad


def test_backward_fills_the_quantity_and_gives_the_gradient_of_the_input() -> None:
    model, x = Several(), numbers(SIZE, 4).requires_grad_()
    output, grads = gated(model, x)
    output["squares"][0].sum().backward()
    expected = loop_grads(model, lambda m, x: m(x)["squares"][0].sum(), x.detach())
    for name, g in expected.items():
        assert_near(grads.result[name], g, name)
    own = x.detach().requires_grad_()
    model(own)["squares"][0].sum().backward()
    assert x.grad is not None
    assert_near(x.grad, own.grad)
    assert not vars(x)


def test_one_tensor_in_two_places_gets_the_sum_of_both_gradients() -> None:
    model, x = Several(), numbers(SIZE, 4).requires_grad_()
    output, _ = gated(model, x, scale=x)
    output["y"].sum().backward()
    own = x.detach().requires_grad_()
    model(own, own)["y"].sum().backward()
    assert_near(x.grad, own.grad)


def test_a_second_backward_needs_the_graph() -> None:
    model, x = Several(), numbers(SIZE, 4)
    output, _ = gated(model, x)
    output["y"].sum().backward()
    with pytest.raises(ScopeError, match="retain_graph=True"):
        output["squares"][0].sum().backward()


def test_a_module_may_write_to_an_argument_that_is_no_leaf() -> None:
    class Doubles(Several):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.map(x)

    model, leaf = Doubles(), numbers(SIZE, 4).requires_grad_()
    output, _ = gated(model, leaf * 1)
    output.sum().backward()
    assert_near(leaf.grad, 2 * model.map.weight.sum(0).expand(SIZE, 4).contiguous())


def test_without_gradients_nothing_is_recorded() -> None:
    model, x = Several(), numbers(SIZE, 4)
    with torch.no_grad():
        output, _ = gated(model, x)
    assert output["y"].grad_fn is None


class Pairs(nn.Module):
    """Returns products of all pairs of samples, which torch.vmap computes out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.map(x)
        return torch.vmap(lambda row: (row * y).sum(1))(y)


def test_an_output_that_was_made_out_of_sight_is_judged() -> None:
    output, _ = gated(Pairs(), numbers(SIZE, 4))
    with pytest.raises(pergrad.PergradError, match="made out of sight"):
        output.sum().backward()
