from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.kernels.depthwise import depthwise_gradients

CASES: dict[str, dict[str, Any]] = {
    "plain": {"channels": 3, "taps": (3, 2)},
    "padded": {"channels": 40, "taps": (7, 7), "padding": (3, 3)},
    "strided": {"channels": 16, "taps": (3, 5), "stride": (2, 3), "padding": (1, 2)},
    "dilated": {"channels": 4, "taps": (2, 3), "dilation": (3, 2), "padding": (2, 4)},
    "of several outputs a channel": {"channels": 5, "taps": (3, 3), "each": 3, "padding": (0, 1)},
    "of one dimension": {"channels": 8, "taps": (1, 9), "size": (1, 70), "padding": (0, 4)},
    "of two rows": {"channels": 4, "taps": (2, 2), "rows": 2, "padding": (1, 1)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_gradients_are_those_of_each_sample(
    case: str, is_channels_last: bool, device: torch.device, dtype: torch.dtype
) -> None:
    sizes = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "each": 1, "rows": 1}
    sizes |= {"size": (9, 11)} | CASES[case]
    rows, channels, geometry = sizes["rows"], sizes["channels"], ("stride", "padding", "dilation")
    options = {name: sizes[name] for name in geometry}
    x = torch.randn(3 * rows, channels, *sizes["size"], device=device).to(dtype)
    shape = (sizes["each"] * channels, 1, *sizes["taps"])
    kernel = torch.zeros(shape, dtype=torch.float64, device=device, requires_grad=True)

    def output(x: Tensor) -> Tensor:
        return F.conv2d(x.double(), kernel, **options, groups=channels)

    g = torch.randn_like(output(x)).to(dtype)
    if is_channels_last:
        g, x = (t.contiguous(memory_format=torch.channels_last) for t in (g, x))
    g, x = (t.unflatten(0, (3, rows)) for t in (g, x))
    exact = torch.stack(
        [
            torch.autograd.grad(output(x_n), kernel, g_n.double())[0]
            for g_n, x_n in zip(g, x, strict=True)
        ]
    )
    given = [list(sizes[name]) for name in ("taps", *geometry)]
    found = depthwise_gradients(g, x, *given, channels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
