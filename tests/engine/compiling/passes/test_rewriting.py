"""Rewritten graphs compute what they computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.compiling.passes.rewriting import rewrite
from pergrad.runtime import internals

_BACKWARD = torch.ops.aten.convolution_backward.default

CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3), (9,)),
    (nn.Conv2d(4, 6, (3, 2), stride=2, padding=1), (8, 7)),
    (nn.Conv2d(4, 6, 3, stride=3, dilation=2), (9, 11)),  # the last columns are in no window
    (nn.Conv2d(4, 8, 3, groups=4, padding=(0, 2)), (5, 6)),
    (nn.Conv3d(2, 3, 2, stride=(1, 2, 2)), (3, 4, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (5,)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (5, 4)),
]


@pytest.mark.parametrize(("layer", "size"), CONVOLUTIONS, ids=lambda value: str(value))
def test_input_gradients_are_convolutions_with_the_same_result(
    layer: nn.Conv2d, size: tuple[int, ...]
) -> None:
    layer.double().requires_grad_(False)
    x = torch.randn(3, layer.in_channels, *size, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x).square().sum(), x)[0]

    traced = internals.trace(gradient)(x)
    assert traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    rewrite(traced.graph)
    traced.recompile()
    assert not traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    torch.testing.assert_close(traced(x), gradient(x))


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format], ids=str)
def test_input_gradients_keep_the_strides_that_a_view_needs(order: torch.memory_format) -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1, groups=4).double().requires_grad_(False)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64).to(memory_format=order)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        out = layer(leaf).contiguous()  # its gradient has other strides than x
        found = torch.autograd.grad(out.square().sum(), leaf)[0]
        last = found.permute(0, 2, 3, 1) if order is torch.channels_last else found
        return last.view(-1, last.shape[-1]) * 2

    traced = internals.trace(gradient)(x)
    rewrite(traced.graph)
    traced.recompile()
    assert not _calls(traced, _BACKWARD)
    torch.testing.assert_close(traced(x), gradient(x))


def test_one_number_of_a_geometry_stands_for_all_dimensions() -> None:
    """A padding of "valid" is traced as one zero."""
    layer = nn.Conv2d(4, 4, 3, stride=2, padding="valid").double().requires_grad_(False)
    x = torch.randn(3, 4, 8, 7, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer(leaf).square().sum(), leaf)[0]

    traced = internals.trace(gradient)(x)
    (node,) = traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    assert node.args[5] == [0]
    rewrite(traced.graph)
    traced.recompile()
    assert not _calls(traced, _BACKWARD)
    torch.testing.assert_close(traced(x), gradient(x))


def test_input_gradients_of_a_channels_last_kernel_are_as_traced() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1).double().requires_grad_(False)
    layer.to(memory_format=torch.channels_last)
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        found = torch.autograd.grad(layer(leaf).square().sum(), leaf)[0]
        return found.permute(0, 2, 3, 1).flatten(1, 2) * 2

    traced = internals.trace(gradient)(x)
    rewrite(traced.graph)
    traced.recompile()
    for node in traced.graph.nodes:
        if node.target in (torch.ops.aten.convolution.default, torch.ops.aten.clone.default):
            given = [n.meta["val"] if isinstance(n, Node) else n for n in node.args]
            assert node.target(*given, **node.kwargs).stride() == node.meta["val"].stride()
    torch.testing.assert_close(traced(x), gradient(x))


def test_columns_that_are_cut_off_are_not_padded() -> None:
    def cut(x: Tensor) -> Tensor:
        return F.pad(x * 2, (0, -3)) @ F.pad(x * 2, (0, -3)).mT

    x = torch.randn(4, 5).double()
    traced = make_fx(cut, tracing_mode="fake")(x)
    rewrite(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(x), cut(x))


def test_gradients_of_kernels_stay_as_they_are() -> None:
    x = torch.randn(2, 3, 5, 5)

    def gradient(kernel: Tensor) -> Tensor:
        kernel = kernel.detach().requires_grad_()
        return torch.autograd.grad(torch.conv2d(x, kernel).square().sum(), kernel)[0]

    kernel = torch.randn(4, 3, 2, 2)
    traced = make_fx(gradient)(kernel)
    rewrite(traced.graph)
    traced.recompile()
    assert traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    torch.testing.assert_close(traced(kernel), gradient(kernel))


def test_gradients_of_kernels_get_channels_last_on_a_gpu() -> None:
    def gradient(g: Tensor, x: Tensor) -> Tensor:
        geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        kernel = g.new_empty(4, 3, 2, 2)
        _, found, _ = torch.ops.aten.convolution_backward(
            g * 2, x, kernel, None, *geometry, [False, True, False]
        )
        return found.float()

    with FakeTensorMode():  # no number is computed
        g = torch.empty(5, 4, 6, 6, device="cuda", dtype=torch.bfloat16)
        x = torch.empty(5, 3, 7, 7, device="cuda", dtype=torch.bfloat16)
        traced = make_fx(gradient)(g, x)
    rewrite(traced.graph)
    (node,) = traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    for given in node.args[:2]:
        assert given.meta["val"].is_contiguous(memory_format=torch.channels_last)
    (cast,) = traced.graph.output_node().all_input_nodes
    assert cast.args[0].kwargs == {"memory_format": torch.contiguous_format}


def _calls(traced: GraphModule, target: object) -> int:
    return len(traced.graph.find_nodes(op="call_function", target=target))


def test_what_is_padded_for_one_product_is_padded_for_all() -> None:
    def products(x: Tensor, weight: Tensor) -> list[Tensor]:
        g = (x * 2).flatten(0, 1)  # (10, 13)
        three = g.unflatten(0, (2, 5))
        padded = F.pad(three, (0, 3))
        return [
            padded @ padded.mT,
            g @ weight,
            F.pad(three, (0, 3)).flatten(0, 1),
            F.pad(g, (1, 3)),
        ]

    x, weight = torch.randn(2, 5, 13).double(), torch.randn(13, 7).double()
    traced = make_fx(products, tracing_mode="fake")(x, weight)
    rewrite(traced.graph)
    traced.recompile()
    assert _calls(traced, torch.ops.aten.cat.default) == 1  # of g
    # Of the weight, and the last, which is another one.
    assert _calls(traced, torch.ops.aten.constant_pad_nd.default) == 2
    torch.testing.assert_close(traced(x, weight), products(x, weight))


def test_inputs_are_padded_where_they_are_used() -> None:
    def padded(x: Tensor, y: Tensor) -> Tensor:
        return F.pad(x, (0, 3)) @ y

    x, y = torch.randn(4, 5), torch.randn(8, 2)
    traced = make_fx(padded, tracing_mode="fake")(x, y)
    rewrite(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(x, y), padded(x, y))


def test_what_is_written_to_is_read_when_it_was() -> None:
    def results(g: Tensor, x: Tensor, kernel: Tensor) -> list[Tensor]:
        g = g * 2
        before = F.pad(g, (0, 3))
        g.view(-1).mul_(3)
        after = F.pad(g, (0, 3))
        geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        of_input, _, _ = torch.ops.aten.convolution_backward(
            g, x, kernel, None, *geometry, [True, False, False]
        )
        return [before, after, of_input]

    inputs = torch.randn(1, 3, 4, 4), torch.randn(1, 2, 5, 5), torch.randn(3, 2, 2, 2)
    traced = make_fx(results, tracing_mode="fake")(*inputs)
    rewrite(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), results(*inputs))


def test_kernels_that_are_written_to_are_read_when_they_were() -> None:
    def gradient(g: Tensor, x: Tensor, kernel: Tensor) -> Tensor:
        g, kernel = g * 2, kernel * 2
        kernel.view(-1).mul_(3)
        geometry = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        of_input, _, _ = torch.ops.aten.convolution_backward(
            g, x, kernel, None, *geometry, [True, False, False]
        )
        return of_input

    inputs = torch.randn(1, 3, 4, 4), torch.randn(1, 2, 5, 5), torch.randn(3, 2, 2, 2)
    traced = make_fx(gradient, tracing_mode="fake")(*inputs)
    rewrite(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), gradient(*inputs))


def test_what_is_made_of_shared_padding_is_a_result_like_others() -> None:
    """Every pass knows the shape of what an earlier one has put there."""

    def step(x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.exp()
        padded = F.pad(rows, (0, 3))
        return padded * padded, rows.flatten(0, 1) @ matrix

    x, matrix = torch.randn(2, 3, 5), torch.randn(5, 4)
    traced = make_fx(step, tracing_mode="fake")(x, matrix)
    rewrite(traced.graph)
    traced.recompile()
    assert all("val" in node.meta for node in traced.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(traced(x, matrix), step(x, matrix))


@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 5)])
def test_biases_are_added_after_the_view_of_a_product(shape: tuple[int, ...]) -> None:
    def layers(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        h = F.linear(x, weight, bias)
        return [h.tanh(), F.linear(h, weight, bias)]

    inputs = [torch.randn(s).double() for s in (shape, (5, 5), (5,))]
    traced = make_fx(layers, tracing_mode="fake")(*inputs)
    before = _calls(traced, torch.ops.aten.addmm.default)
    rewrite(traced.graph)
    traced.recompile()
    after = _calls(traced, torch.ops.aten.addmm.default)
    assert (before, after) == (2, 2 if len(shape) == 2 else 0)  # there is no view of a matrix
    torch.testing.assert_close(traced(*inputs), layers(*inputs))


def test_a_bias_that_is_written_to_is_added_when_it_was() -> None:
    def layer(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        bias = bias * 2
        h = torch.addmm(bias, x.flatten(0, 1), weight)
        bias.mul_(3)
        return [h.view(2, 3, 5), bias]

    inputs = [torch.randn(s).double() for s in ((2, 3, 5), (5, 5), (5,))]
    traced = make_fx(layer, tracing_mode="fake")(*inputs)
    rewrite(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(*inputs), layer(*inputs))
