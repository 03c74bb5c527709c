"""|G_n|² with G_n = Σ_t g_t ⊗ x_t, a tile of the gradient at a time.

A program computes one tile of one sample's gradient in registers and sums its squares. This is cheaper than
pairs of positions if a sample has many positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import (
    INTERPRETED,
    MULTIPROCESSORS,
    Kernel,
    float32_precision,
    power_of_two,
    same_dtype,
)
from pergrad.runtime import operation

__all__ = ["tile_microseconds", "tile_squared_norms"]


@Kernel
@triton.jit
def _tile_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    parts,
    T,
    O,
    I,
    g_n,
    g_t,
    g_o,
    x_n,
    x_t,
    x_i,
    TILES_O,
    TILES_I,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    n = (program // (TILES_O * TILES_I)).to(tl.int64)
    tile = program % (TILES_O * TILES_I)
    o = (tile // TILES_I) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tile % TILES_I) * BLOCK_I + tl.arange(0, BLOCK_I)
    t = tl.arange(0, POSITIONS)
    g_at = g + n * g_n + t[:, None].to(tl.int64) * g_t + o[None, :] * g_o
    x_at = x + n * x_n + t[:, None].to(tl.int64) * x_t + i[None, :] * x_i
    found = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    for first in range(0, T, POSITIONS):
        is_position = (t < T - first)[:, None]
        a = tl.load(g_at, mask=is_position & (o < O)[None, :], other=0.0)
        b = tl.load(x_at, mask=is_position & (i < I)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        found = tl.dot(tl.trans(a), b, found, input_precision=PRECISION)
        g_at += POSITIONS * g_t
        x_at += POSITIONS * x_t
    tl.store(parts + program, tl.sum(tl.sum(found * found, axis=1), axis=0))


@operation("tile_squared_norms", lambda g, x: g.new_empty(len(g), dtype=torch.float64))
def tile_squared_norms(g: Tensor, x: Tensor) -> Tensor:
    """Computes squared norms from g (n, t, o) and x (n, t, i): (n,) in float64."""
    g, x = same_dtype(g, x)
    n, t, o = g.shape
    i = x.shape[2]
    block_o, block_i, positions, warps, stages = _blocks(t, o, i, g.dtype)
    tiles_o, tiles_i = -(-o // block_o), -(-i // block_i)
    parts = torch.empty(n, tiles_o * tiles_i, device=g.device, dtype=torch.float64)
    settings = {
        "BLOCK_O": block_o,
        "BLOCK_I": block_i,
        "POSITIONS": positions,
        "PRECISION": float32_precision(),
        "WIDEN": INTERPRETED,
        "num_warps": warps,
        "num_stages": stages,
    }
    _tile_kernel(
        parts.numel(), g, x, parts, t, o, i, *g.stride(), *x.stride(), tiles_o, tiles_i, **settings
    )
    return parts.sum(1)


def tile_microseconds(n: int, t: int, o: int, i: int, dtype: torch.dtype) -> float:
    """Estimates the time on an H200, padding included, and processors that few programs leave idle."""
    block_o, block_i, positions, *_ = _blocks(t, o, i, dtype)
    programs = n * -(-o // block_o) * -(-i // block_i)
    each = block_o * block_i * -(-t // positions) * positions
    return max(programs / MULTIPROCESSORS, 1.0) * each / _RATES[dtype.itemsize]


# Multiplications per microsecond of one multiprocessor, by the bytes of a number.
_RATES = {2: 1.5e6, 4: 1.1e5}


def _blocks(t: int, o: int, i: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Returns rows and columns of a tile, positions per step, warps and pipeline stages."""
    if dtype == torch.float32:
        side = 64
        return power_of_two(o, 16, side), power_of_two(i, 16, side), power_of_two(t, 16, 32), 4, 3
    block_o, block_i = power_of_two(o, 16, 128), power_of_two(i, 16, 128)
    warps = 8 if block_o * block_i > 64 * 128 else 4
    return block_o, block_i, power_of_two(t, 16, 64), warps, 3
