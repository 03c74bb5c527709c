"""Rewritten graphs compute what they computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.engine.rewriting import rewrite_input_gradients

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

    traced = make_fx(gradient)(x)
    assert traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    rewrite_input_gradients(traced.graph)
    traced.recompile()
    assert not traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    torch.testing.assert_close(traced(x), gradient(x))


def test_gradients_of_kernels_stay_as_they_are() -> None:
    x = torch.randn(2, 3, 5, 5)

    def gradient(kernel: Tensor) -> Tensor:
        kernel = kernel.detach().requires_grad_()
        return torch.autograd.grad(torch.conv2d(x, kernel).square().sum(), kernel)[0]

    kernel = torch.randn(4, 3, 2, 2)
    traced = make_fx(gradient)(kernel)
    rewrite_input_gradients(traced.graph)
    traced.recompile()
    assert traced.graph.find_nodes(op="call_function", target=_BACKWARD)
    torch.testing.assert_close(traced(kernel), gradient(kernel))
