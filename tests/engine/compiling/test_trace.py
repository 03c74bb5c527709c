"""A trace has no values in it: of the weights, of the batch, or of what is random."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pergrad
from pergrad.engine.compiling.state import graph_inputs, state_of
from pergrad.engine.compiling.trace import reason_of, trace_step
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.quantities import Quantity
from pergrad.testing import assert_near, loop_grads
from tests.scripts import fusing_scripts


def traced(model: nn.Module, *batch: Any) -> tuple[Any, Any, list[Tensor], list[Any]]:
    def step(quantities: Sequence[Quantity], batch: Sequence[Any]) -> Tensor:
        return run_recorded(model, _losses, batch, quantities, Options())

    flat, spec = pytree.tree_flatten(batch)
    state, _ = state_of(model)
    graph, template, _ = trace_step(step, model, [pergrad.Norms()], state, flat, spec)
    return graph, template, state, flat


def _losses(model: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    return output.flatten(1).square().sum(1) * scale


def test_graph_takes_weights_and_batch_and_gives_losses_and_results() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    graph, template, _, _ = traced(model, x, 2.0)
    with torch.no_grad():
        model.weight.mul_(3)  # the graph reads it anew
    other = torch.randn(4, 3, dtype=torch.float64)
    losses, *results = graph(*graph_inputs(state_of(model)[0], [other, 2.0]))
    assert_near(losses, _losses(model, other, 2.0).detach())
    expected = pergrad.norms(model, _losses, other, 2.0)
    assert any(t.shape == (4,) and torch.allclose(t, expected) for t in results)
    assert len(template.attributes) == 1


def test_model_is_what_it_was_and_no_weight_lies_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    graph, *_ = traced(model, torch.randn(4, 3))
    for name, t in model.state_dict(keep_vars=True).items():
        assert id(t) == before[name][0]
        assert torch.equal(t, before[name][1])
    constants = [t for t in vars(graph).values() if isinstance(t, Tensor) and t.numel() > 1]
    assert constants == []


def test_recurrent_layers_may_flatten_their_weights_again_afterwards() -> None:
    model = nn.GRU(3, 2, batch_first=True)
    traced(model, torch.randn(4, 5, 3))
    assert "flatten_parameters" not in vars(model)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_autocast_keeps_its_casts_again_afterwards(is_enabled: bool) -> None:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(is_enabled)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            traced(nn.Linear(3, 2), torch.randn(4, 3))
        assert torch.is_autocast_cache_enabled() is is_enabled
    finally:
        torch.set_autocast_cache_enabled(was)


def test_control_flow_that_depends_on_values_cannot_be_traced() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.sum() > 0 else 1)

    model = Looks(3, 2)
    with pytest.raises(Exception, match=r"data-dependent|Could not guard"):
        traced(model, torch.randn(4, 3))
    assert isinstance(model.weight, nn.Parameter)


def shrunk(x: Tensor) -> Tensor:
    return (x * 2 + 1).tanh() * x.sigmoid()


class Scripted(nn.Module):
    """Calls a scripted function between layers, as DeBERTa does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.shrunk = torch.jit.script(shrunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shrunk(self.first(x)))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_steps_that_call_fused_functions_are_traced() -> None:
    torch.manual_seed(0)
    model, grads = Scripted().double(), pergrad.Grads()
    with fusing_scripts(), warnings.catch_warnings():
        warnings.filterwarnings("error", "pergrad")
        for _ in range(4):
            x = torch.randn(5, 3, dtype=torch.float64)
            _losses(model, x).sum().backward()
        assert "TensorExprGroup" in str(model.shrunk.graph_for(model.first(x)))
        step = pergrad.compiled(model, _losses, grads, backend="eager")
        for _ in range(3):
            x = torch.randn(5, 3, dtype=torch.float64)
            step(x)
            for name, wanted in loop_grads(model, _losses, x).items():
                assert_near(grads.result[name], wanted, name)
    assert step.graphs == 1


def failing(x: Tensor) -> Tensor:
    return x.view(7)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_the_reason_of_a_scripted_function_is_the_innermost_one() -> None:
    scripted = torch.jit.script(failing)
    with pytest.raises(RuntimeError) as caught:
        scripted(torch.ones(2))
    assert str(caught.value).startswith("The following operation failed in the TorchScript")
    reason = reason_of(caught.value)
    assert reason.startswith("in a scripted function: RuntimeError: shape '[7]' is invalid")
    assert "\n" not in reason


def test_the_reason_of_another_error_is_its_first_line() -> None:
    assert reason_of(ValueError("too long\nRuntimeError: not this")) == "ValueError: too long"
