"""Compiled graphs give what the graph gives, outside of autograd and autocast."""

import warnings

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.inductor_backend import compile_graph


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
