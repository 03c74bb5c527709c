"""|g ⊗ x|² = |g|² |x|², for samples with one position each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import Kernel, power_of_two
from pergrad.runtime import operation

__all__ = ["rank_one_squared_norms"]


@triton.jit
def _squares(at, stride, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, width, BLOCK):
        v = tl.load(at + (first + k) * stride, mask=k < width - first, other=0.0).to(tl.float64)
        found += v * v
    return tl.sum(found, axis=0)


@Kernel
@triton.jit
def _rank_one_kernel(  # type: ignore[no-untyped-def]
    g, x, out, O, I, g_n, g_o, x_n, x_i, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    # In float64, since one may be huge and the other tiny.
    of_g = _squares(g + n * g_n, g_o, O, BLOCK)
    of_x = _squares(x + n * x_n, x_i, I, BLOCK)
    tl.store(out + n, of_g * of_x)


@operation("rank_one_squared_norms", lambda g, x: g.new_empty(len(g), dtype=torch.float64))
def rank_one_squared_norms(g: Tensor, x: Tensor) -> Tensor:
    """|g_n ⊗ x_n|² of g (n, o) and x (n, i): (n,) in float64."""
    n, o = g.shape
    i = x.shape[1]
    out = torch.empty(n, device=g.device, dtype=torch.float64)
    block = power_of_two(max(o, i), 64, 1024)
    _rank_one_kernel(n, g, x, out, o, i, *g.stride(), *x.stride(), BLOCK=block)
    return out
