"""c_n x_n, or x_n unscaled; zero where c_n is zero, even if x_n is not finite. In one pass.

Pads rows with zeros to a width that matrix products read fast.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import Kernel, power_of_two
from pergrad.runtime import operation

__all__ = ["scaled_samples"]


@Kernel
@triton.jit
def _scaled_kernel(  # type: ignore[no-untyped-def]
    x,
    weights,
    out,
    T,
    WIDTH,
    PADDED,
    TILES,
    IS_SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    n = (program // TILES).to(tl.int64)
    row = (program % TILES) * ROWS + tl.arange(0, ROWS)
    weight = tl.load(weights + n).to(tl.float32)
    width = tl.where(weight != 0.0, WIDTH, 0)  # a sample of weight zero is not read
    x_at = x + n * T * WIDTH + row.to(tl.int64)[:, None] * WIDTH
    out_at = out + n * T * PADDED + row.to(tl.int64)[:, None] * PADDED
    for first in range(0, PADDED, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        is_row = (row < T)[:, None]
        values = tl.load(x_at + column, mask=is_row & (column < width), other=0.0)
        if IS_SCALED:
            values = (values.to(tl.float32) * weight).to(values.dtype)
        tl.store(out_at + column, values, mask=is_row & (column < PADDED))


def _padded(x: Tensor) -> tuple[int, ...]:
    aligned = 8 if x.dtype.itemsize == 2 and x.dim() == 3 else 1
    return (*x.shape[:-1], x.shape[-1] + -x.shape[-1] % aligned)


@operation("scaled_samples", lambda x, weights, is_scaled: x.new_empty(_padded(x)))
def scaled_samples(x: Tensor, weights: Tensor, is_scaled: bool) -> Tensor:
    """Scales x (n, ...) by weights (n,), in the dtype of x; without `is_scaled` only zeroes samples.

    For (n, t, d) in half precision, pads d to a multiple of 8.
    """
    out = x.new_empty(_padded(x))
    n, width = len(x), x.shape[-1]
    t = x[0].numel() // max(width, 1)
    columns = power_of_two(width, 16, 1024)
    rows = max(1, 4096 // columns)
    tiles = -(-t // rows)
    _scaled_kernel(
        n * tiles,
        x.contiguous(),
        weights,
        out,
        t,
        width,
        out.shape[-1],
        tiles,
        IS_SCALED=is_scaled,
        ROWS=power_of_two(rows, 1, 256),
        COLUMNS=columns,
    )
    return out
