from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.convolution import (
    _quotient,
    convolution_by_gram,
    convolution_by_tiles,
    convolution_gram_is_cheaper,
)

CASES: dict[str, dict[str, Any]] = {
    "plain": {"channels": 3, "outputs": 5, "taps": (3, 2)},
    "strided": {"channels": 16, "outputs": 8, "taps": (3, 3), "stride": (2, 1), "padding": (1, 1)},
    "dilated": {"channels": 4, "outputs": 6, "taps": (2, 2), "dilation": (2, 1), "groups": 2},
    "of one tap": {"channels": 32, "outputs": 16, "taps": (1, 1), "stride": (2, 2)},
    "of one tap and two rows": {"channels": 24, "outputs": 5, "taps": (1, 1), "rows": 2},
    "of one tap, padded": {"channels": 8, "outputs": 4, "taps": (1, 1), "padding": (1, 0)},
    "of one tap, grouped": {"channels": 8, "outputs": 4, "taps": (1, 1), "groups": 2},
    "of whole taps": {"channels": 64, "outputs": 20, "taps": (3, 3), "padding": (1, 1)},
    "of two rows": {"channels": 4, "outputs": 4, "taps": (2, 2), "rows": 2},
}


@pytest.mark.parametrize("norms", [convolution_by_tiles, convolution_by_gram])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_norms_are_those_of_the_kernels_gradient(
    norms: Any, case: str, is_channels_last: bool, device: torch.device, dtype: torch.dtype
) -> None:
    sizes = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "rows": 1}
    sizes |= CASES[case]
    rows, groups, geometry = sizes["rows"], sizes["groups"], ("stride", "padding", "dilation")
    options = {name: sizes[name] for name in (*geometry, "groups")}
    x = torch.randn(2 * rows, sizes["channels"], 6, 7, device=device).to(dtype)
    kernel = torch.zeros(
        sizes["outputs"],
        sizes["channels"] // groups,
        *sizes["taps"],
        dtype=torch.float64,
        device=device,
        requires_grad=True,
    )

    def output(x: Tensor) -> Tensor:
        return F.conv2d(x.double(), kernel, **options)

    g = torch.randn_like(output(x)).to(dtype)
    if is_channels_last:
        g, x = (t.contiguous(memory_format=torch.channels_last) for t in (g, x))
    g, x = (t.unflatten(0, (2, rows)) for t in (g, x))
    exact = torch.stack(
        [
            torch.autograd.grad(output(x_n), kernel, g_n.double())[0].square().sum()
            for g_n, x_n in zip(g, x, strict=True)
        ]
    )
    found = norms(g, x, list(sizes["taps"]), *(list(sizes[name]) for name in geometry), groups)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


@triton.jit
def _quotients(a, b, found, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(found + at, _quotient(tl.load(a + at)[:, None], b).reshape(BLOCK))


@pytest.mark.parametrize("b", [1, 2, 3, 7, 14, 56, 113, 224, 1025, 2**11 - 1])
def test_quotients_are_exact(b: int, device: torch.device) -> None:
    multiples = torch.tensor([0, 1, 2, 3, 1000, 2**16 + 1, 2**20 - 1, 2**20], device=device) * b
    a = torch.cat([multiples, multiples + b - 1, multiples + b // 2, multiples + b // 3])
    a = a.to(torch.int32)
    found = torch.empty_like(a)
    _quotients[(1,)](a, b, found, BLOCK=len(a))
    torch.testing.assert_close(found, a // b)


def test_few_positions_make_pairs_the_cheaper_way() -> None:
    assert convolution_gram_is_cheaper(16, 512, 4608)
    assert not convolution_gram_is_cheaper(1024, 64, 576)


@pytest.mark.parametrize("groups", [1, 2])
def test_positions_that_cancel_leave_norms_exact(
    groups: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Two rows of a sample with the same input, whose gradients nearly cancel, but for the last one."""
    x = torch.randn(3, 1, 8, 5, 6, device=device).expand(-1, 2, -1, -1, -1).to(dtype)
    g = torch.randn(3, 1, 4, 4, 5, device=device)
    nearly = g * (1 + (1e-4 if dtype == torch.float32 else 1e-2) * torch.randn_like(g))
    nearly[2] = 0
    g = torch.cat([g, -nearly], 1).to(dtype)
    exact = []
    for one, seen in zip(g.double(), x.double(), strict=True):
        kernel = torch.zeros(4, 8 // groups, 2, 2, dtype=torch.float64, device=device)
        kernel.requires_grad_()
        (F.conv2d(seen, kernel, groups=groups) * one).sum().backward()
        assert kernel.grad is not None
        exact.append(kernel.grad.square().sum())
    found = convolution_by_gram(g, x, (2, 2), (1, 1), (0, 0), (1, 1), groups)
    torch.testing.assert_close(found, torch.stack(exact), rtol=1e-3, atol=0)
