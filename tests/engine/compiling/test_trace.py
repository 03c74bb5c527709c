"""A trace has no values in it: of the weights, of the batch, or of what is random."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pergrad
from pergrad.engine.compiling.state import graph_inputs, state_of
from pergrad.engine.compiling.trace import trace_step
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.quantities import Quantity
from pergrad.testing import assert_near


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
