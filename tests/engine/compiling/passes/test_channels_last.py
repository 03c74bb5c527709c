"""Sums over the positions of images, laid out as convolutions are, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pergrad.engine.compiling.passes import channels_last
from pergrad.engine.compiling.passes.graph import written_in
from pergrad.engine.compiling.passes.rewriting import rewrite
from pergrad.engine.compiling.passes.strides import guard_strides
from pergrad.runtime import internals

pytest.importorskip("pergrad.kernels.launchers", reason="Triton is not installed")

SUMS = "pergrad::column_squared_norms"


def _sums(g: Tensor, x: Tensor) -> Tensor:
    """As a trace sees the norms of a batch norm's scale and shift."""
    gs, xs = ([t.flatten(2).movedim(1, 2)] for t in (g, x))
    one = torch.ones(len(g), 1, g.shape[1], dtype=g.dtype)
    found: Tensor = torch.ops.pergrad.column_squared_norms.default(gs, xs, [one, 2 * one], [0])
    return found


def _step(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
    g = x.relu() * 2
    x = torch.conv2d(x, kernel)
    flat = g.unsqueeze(1).flatten(1) + 1
    return _sums(g, x), flat, torch.conv2d(g, kernel), g.unsqueeze(1).mT, g


def _by_torch(gs: list[Tensor], xs: list[Tensor], statistics: list[Tensor]) -> Tensor:
    """Computes what the kernel does, whatever the strides are."""
    mean, inverse = statistics
    products = [g * (x - mean) * inverse for g, x in zip(gs, xs, strict=True)]
    return torch.stack([t.sum(1).square().sum(1) for t in (*products, gs[0])])


def _numbers(traced: GraphModule, *inputs: Tensor) -> Any:
    """Runs the graph as a backend gets it, without the kernel, which needs a GPU or the interpreter."""
    guard_strides(traced.graph, written_in(traced.graph))
    for node in traced.graph.nodes:
        if str(getattr(node.target, "name", lambda: "")()) == SUMS:
            node.target, node.args = _by_torch, node.args[:3]
    traced.recompile()
    return traced(*inputs)


def _traced(step: Any, *inputs: Tensor) -> GraphModule:
    traced: GraphModule = internals.trace(step)(*inputs)
    return traced


def _sum_of(traced: GraphModule) -> Node:
    (node,) = [n for n in traced.graph.nodes if channels_last._is_sum(n)]
    found: Node = node
    return found


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setattr(channels_last, "is_on_gpu", lambda node: True)
    random = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, 5, 6, generator=random), torch.randn(4, 4, 1, 1, generator=random)


def test_sums_read_channels_last_in_a_graph_with_convolutions(
    inputs: tuple[Tensor, Tensor],
) -> None:
    expected = _numbers(_traced(_step, *inputs), *inputs)
    traced = _traced(_step, *inputs)
    rewrite(traced.graph)
    gs, xs, *_ = _sum_of(traced).args
    for (given,), is_cloned in ((gs, True), (xs, False)):  # type: ignore[misc]
        assert given.meta["val"].shape == (3, 30, 4)
        source = given.args[0].args[0]
        target = torch.ops.aten.clone if is_cloned else torch.ops.aten.convolution
        assert source.target is target.default
        if is_cloned:
            assert given.meta["val"].is_contiguous()
            readers = {user.target for user in source.users}
            assert {torch.ops.aten.convolution.default, torch.ops.aten.unsqueeze.default} <= readers
    for found, wanted in zip(_numbers(traced, *inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_results_keep_the_order_of_the_trace(inputs: tuple[Tensor, Tensor]) -> None:
    traced = _traced(_step, *inputs)
    rewrite(traced.graph)
    *_, viewed, g = _numbers(traced, *inputs)
    assert g.is_contiguous()
    assert viewed.mT.is_contiguous()


def test_later_views_of_what_is_channels_last_may_copy(inputs: tuple[Tensor, Tensor]) -> None:
    def step(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        g = x.relu() * 2
        return _sums(g, torch.conv2d(x, kernel)), (g + 1).view(len(g), -1)

    expected = _numbers(_traced(step, *inputs), *inputs)
    traced = _traced(step, *inputs)
    rewrite(traced.graph)
    for found, wanted in zip(_numbers(traced, *inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_sums_over_another_view_of_an_image_are_left_alone(inputs: tuple[Tensor, Tensor]) -> None:
    def step(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        g, x = x.relu() * 2, torch.conv2d(x, kernel)
        by_channel = [t.flatten(2) for t in (g, x)]
        one = torch.ones(len(g), 1, g.shape[2] * g.shape[3], dtype=g.dtype)
        of_places: Tensor = torch.ops.pergrad.column_squared_norms.default(
            by_channel[:1], by_channel[1:], [one, one], [0]
        )
        return _sums(g, x), of_places

    traced = _traced(step, *inputs)
    rewrite(traced.graph)
    shapes = [
        n.args[0][0].meta["val"].shape for n in traced.graph.nodes if channels_last._is_sum(n)
    ]
    assert shapes == [(3, 4, 30), (3, 30, 4)]


def test_other_sums_are_left_alone(
    inputs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_convolutions(x: Tensor, kernel: Tensor) -> Tensor:
        return _sums(x.relu(), x * 2)

    def of_inputs(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        return _sums(x, x), torch.conv2d(x, kernel)

    def of_part(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        g = (x.relu() * 2)[:, :2]
        return _sums(g, g), torch.conv2d(x, kernel)

    def of_one_position(x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        g = x.sum((2, 3), keepdim=True)
        return _sums(g, g), torch.conv2d(x, kernel)

    for step in (without_convolutions, of_inputs, of_part, of_one_position):
        traced = _traced(step, *inputs)
        before = _sum_of(traced).args[:2]
        rewrite(traced.graph)
        assert _sum_of(traced).args[:2] == before, step
    monkeypatch.undo()  # on a CPU
    traced = _traced(_step, *inputs)
    before = _sum_of(traced).args[:2]
    rewrite(traced.graph)
    assert _sum_of(traced).args[:2] == before
