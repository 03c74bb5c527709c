"""Compiled graphs give what the graph gives, outside of autograd and autocast."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling import inductor_backend
from pergrad.engine.compiling.inductor_backend import compile_graph
from pergrad.runtime import internals


def _step(x: Tensor, counter: Tensor) -> list[Tensor]:
    counter.add_(1)
    return [(x @ x.mT).tanh().sum(1), x * 2]


def test_results_and_writes_are_those_of_the_graph() -> None:
    x, counter = torch.randn(4, 3), torch.zeros(())
    graph = make_fx(_step, tracing_mode="fake")(x, counter)
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        call = compile_graph(graph, [x, counter])
    for calls in (1, 2):
        other = torch.randn(4, 3)
        with torch.no_grad():
            found = call(other, counter)
        wanted = _step(other, torch.zeros(()))
        torch.testing.assert_close(list(found), wanted)
        assert counter == calls


def test_a_graph_that_only_the_rewriting_spoils_is_compiled_as_it_was_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, given = inductor_backend._compiled, []

    def refuses_the_rewritten(graph: GraphModule, *options: Any) -> Any:
        given.append(graph)
        if len(given) == 1:
            raise RuntimeError("the compiler does not take this")
        return compiled(graph, *options)

    monkeypatch.setattr(inductor_backend, "_compiled", refuses_the_rewritten)
    x, counter = torch.randn(4, 3), torch.zeros(())
    graph = make_fx(_step, tracing_mode="fake")(x, counter)
    with pytest.warns(UserWarning, match="compiled it as it was traced"):
        call = compile_graph(graph, [x, counter])
    with torch.no_grad():
        torch.testing.assert_close(list(call(x, counter)), _step(x, torch.zeros(())))
    assert counter == 1
    assert [node.target for node in given[1].graph.nodes] == [n.target for n in graph.graph.nodes]


def test_a_graph_that_does_not_compile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(internals, "compile_fx", fail)
    x, counter = torch.randn(4, 3), torch.zeros(())
    graph = make_fx(_step, tracing_mode="fake")(x, counter)
    with pytest.raises(RuntimeError, match="no C"):
        compile_graph(graph, [x, counter])
