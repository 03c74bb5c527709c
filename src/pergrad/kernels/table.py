"""|Σ_t e_r(t) ⊗ g_t|², for the rows r(t) of a table that a sample looked up.

The positions are sorted by row. The program of a row's first position sums the whole row; programs of its
other positions do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import Kernel, power_of_two
from pergrad.runtime import operation

__all__ = ["table_squared_norms"]


@Kernel
@triton.jit
def _table_kernel(  # type: ignore[no-untyped-def]
    index, order, g, parts, T, D, g_n, g_t, g_d, TILES, COLUMNS: tl.constexpr
):
    program = tl.program_id(0)
    n = (program // (T * TILES)).to(tl.int64)
    position = program // TILES % T
    d = (program % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    rows = index + n * T
    row = tl.load(rows + position)
    before = tl.load(rows + tl.maximum(position - 1, 0))
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    if (position == 0) | (before != row):
        at = position
        same = 1
        while same > 0:
            t = tl.load(order + n * T + at)
            total += tl.load(g + n * g_n + t * g_t + d * g_d, mask=d < D, other=0.0).to(tl.float32)
            at += 1
            following = tl.load(rows + tl.minimum(at, T - 1))
            same = ((at < T) & (following == row)).to(tl.int32)
    tl.store(parts + program, tl.sum(total * total, axis=0))


@operation("table_squared_norms", lambda index, g: g.new_empty(len(g), dtype=torch.float64))
def table_squared_norms(index: Tensor, g: Tensor) -> Tensor:
    """Computes squared norms from index (n, t) and g (n, t, d): (n,) in float64."""
    n, t, d = g.shape
    rows, order = index.sort(dim=1, stable=True)
    columns = power_of_two(d, 16, 1024)
    tiles = -(-d // columns)
    parts = torch.empty(n, t * tiles, device=g.device, dtype=torch.float64)
    _table_kernel(parts.numel(), rows, order, g, parts, t, d, *g.stride(), tiles, COLUMNS=columns)
    return parts.sum(1)
