"""Casts of parameters are made at once, and those that may not be moved stay where they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.compiling.passes import casts
from pergrad.engine.compiling.passes.graph import calls
from tests.engine.rewritten import rewritten

_CASTS, _ONE = torch.ops.pergrad.casts.default, torch.ops.aten._to_copy.default


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "is_on_gpu", lambda node: True)


@pytest.mark.parametrize("other", [torch.randn(3, 4), torch.randn(4).expand(3, 4)])
def test_casts_of_inputs_to_one_type_are_one_call(other: Tensor) -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        half, again = a.bfloat16(), a.detach().bfloat16()
        return [half + 1, b.bfloat16() * again, c.half(), (a + 1).bfloat16()]

    inputs = [torch.randn(3, 4), other, torch.randn(2)]
    graph = rewritten(casts.cast_at_once, step, *inputs)
    assert [len(node.args[0]) for node in calls(graph.graph, _CASTS)] in ([1, 2], [2, 1])
    assert len(calls(graph.graph, _ONE)) == 1  # of what is no input
    for found, wanted in zip(graph(*inputs), step(*inputs), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_an_input_that_is_written_to_is_cast_where_it_was() -> None:
    def step(a: Tensor, b: Tensor) -> list[Tensor]:
        a.add_(1)
        return [a.bfloat16(), b.bfloat16()]

    graph = rewritten(casts.cast_at_once, step, torch.zeros(3), torch.zeros(3))
    assert len(calls(graph.graph, _ONE)) == 1
    first, second = graph(torch.zeros(3), torch.zeros(3))
    assert first.tolist() == [1] * 3
    assert second.tolist() == [0] * 3


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_step_under_autocast_gives_what_it_gave(backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
    grads = pergrad.Grads()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().sum(1)

    step = pergrad.compiled(model, loss, grads, backend=backend)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            step(x)
        expected = pergrad.grads(model, loss, x)
    assert step.graphs == 1
    for name, wanted in expected.items():
        error = (grads.result[name] - wanted).norm() / wanted.norm()
        assert error < 0.01, name
