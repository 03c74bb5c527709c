"""A graph gives the same numbers whatever strides its backend gives to the tensors between."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import pergrad
from pergrad.engine.compiling.inductor_backend import compile_graph
from pergrad.engine.compiling.passes.graph import written_in
from pergrad.engine.compiling.passes.strides import guard_strides
from pergrad.testing import assert_near, loop_grads


def _guarded(step: Callable[[Tensor], list[Tensor]], x: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(step, tracing_mode="fake")(x)
    guard_strides(graph.graph, written_in(graph.graph))
    graph.recompile()
    return graph


def _retraced(graph: GraphModule, x: Tensor) -> list[str]:
    """Lists the operators that a compiler gets."""
    nodes = make_fx(graph, tracing_mode="fake")(x).graph.nodes
    return [str(node.target) for node in nodes if node.op == "call_function"]


def _flattened(x: Tensor) -> list[Tensor]:
    return [x.view(-1) * 2, x.as_strided((2,), (x.stride(0),)) + 1]


def test_views_hold_for_other_strides_than_those_of_the_trace() -> None:
    x = torch.randn(2, 3)
    graph = _guarded(_flattened, x)
    for given in (x, x.T.contiguous().T):
        for found, wanted in zip(graph(given), _flattened(x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_where_the_strides_are_those_of_the_trace_nothing_is_copied() -> None:
    x = torch.randn(2, 3)
    plain = _retraced(make_fx(_flattened, tracing_mode="fake")(x), x)
    assert _retraced(_guarded(_flattened, x), x) == plain


def test_strides_of_dimensions_of_size_one_are_free() -> None:
    def row(x: Tensor) -> list[Tensor]:
        x.as_strided((3,), (1,)).zero_()
        return [x * 1]

    given = torch.randn(3).as_strided((1, 3), (7, 1))
    (found,) = _guarded(row, torch.randn(1, 3))(given)
    assert not found.any()


def test_a_view_that_is_written_through_stays_a_view() -> None:
    def step(x: Tensor) -> list[Tensor]:
        x.view(-1).zero_()
        return [x * 1]

    x = torch.randn(2, 3)
    graph = _guarded(step, x)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        graph(torch.randn(3, 2).T)
    (found,) = graph(x)
    assert not found.any()
    assert not x.any()


def _joined(x: Tensor) -> Tensor:
    """Copies a transposed tensor into the order of its dimensions; the compiler keeps its strides."""
    return torch.cat([torch.tensor([], dtype=x.dtype), x.transpose(1, 2)], dim=-2)


def test_views_hold_for_the_functions_that_the_compiler_puts_in_place_of_others() -> None:
    def step(x: Tensor) -> list[Tensor]:
        return [F.pixel_shuffle(x, 2).view(2, 32)]

    with FakeTensorMode():  # on a GPU, which it needs not
        x = torch.empty(2, 8, 2, 2, device="cuda").to(memory_format=torch.channels_last)
        plain: GraphModule = make_fx(step)(x)
        with pytest.raises(ValueError, match="Cannot view"):
            make_fx(plain, decomposition_table=select_decomp_table())(x)
        guard_strides(plain.graph, set())
        plain.recompile()
        (found,) = make_fx(plain, decomposition_table=select_decomp_table())(x)(x)
    assert found.shape == (2, 32)


def test_windows_are_those_of_the_trace_where_the_compiler_gives_other_strides() -> None:
    def windows(x: Tensor) -> list[Tensor]:
        seen = _joined(x)
        return [seen.as_strided((2, 4, 2), (12, 3, 1)) * 2]

    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        graph: GraphModule = make_fx(windows, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        (found,) = compile_graph(graph, [x])(x)
    torch.testing.assert_close(found, windows(x)[0])


class Cached(nn.Module):
    """Appends keys to an empty cache, as Hugging Face does, and shuffles pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, 8) -> (n, 4 t t)
        heads = [layer(x).unflatten(2, (4, -1)) for layer in (self.keys, self.queries)]
        keys, queries = (_joined(h) for h in heads)
        scores = queries @ keys.transpose(2, 3)
        images = self.last(scores.contiguous(memory_format=torch.channels_last))
        return F.pixel_shuffle(images, 2).flatten(1)


def test_a_step_compiles_whatever_strides_the_compiler_gives() -> None:
    torch.manual_seed(0)
    model, grads = Cached().double(), pergrad.Grads()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    step = pergrad.compiled(model, loss, grads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x = torch.randn(3, 5, 8, dtype=torch.float64)
            step(x)
            for name, wanted in loop_grads(model, loss, x).items():
                assert_near(grads.result[name], wanted, name)
    assert "1 graph by inductor" in repr(step)
