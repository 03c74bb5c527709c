"""Σ_n c_n G_n of materialised gradients: each is read once, or not at all if its weight is zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import Kernel, power_of_two
from pergrad.runtime import operation

__all__ = ["weighted_rows"]

_TILE = 8192  # numbers that a program reads at a time


@Kernel
@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    rows,
    weights,
    out,
    N,
    D,
    STRIDE,
    SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    d = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, N, SAMPLES):
        n = (first + tl.arange(0, SAMPLES)).to(tl.int64)
        weight = tl.load(weights + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        is_read = (weight != 0.0) & (d < D)[None, :]
        row = tl.load(rows + n[:, None] * STRIDE + d[None, :], mask=is_read, other=0.0)
        total += tl.sum(row.to(tl.float32) * weight, axis=0)
    tl.store(out + d, total, mask=d < D)


@operation(
    "weighted_rows", lambda rows, weights: rows.new_empty(rows.shape[1], dtype=torch.float32)
)
def weighted_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_n weights[n] rows[n] of rows (n, d): (d,) in float32."""
    n, d = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(d, device=rows.device, dtype=torch.float32)
    samples = power_of_two(n, 1, 16)
    columns = power_of_two(d, 128, _TILE // samples)
    _rows_kernel(
        -(-d // columns),
        rows,
        weights,
        out,
        n,
        d,
        rows.stride(0),
        SAMPLES=samples,
        COLUMNS=columns,
        num_warps=8 if samples * columns >= _TILE else 4,
    )
    return out
