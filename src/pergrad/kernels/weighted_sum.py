"""Σ_n c_n Σ_t g[n,t] ⊗ x[n,t]: the weights of the samples are applied as the gradients are read.

A sample of weight zero adds nothing, whatever is in it. The sum over samples is cut into a few ranges,
whose tiles are added up in order: nothing depends on which program is done first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import (
    INTERPRETED,
    MULTIPROCESSORS,
    float32_precision,
    operation,
    power_of_two,
    same_dtype,
)

__all__ = ["weighted_outer_products"]


@triton.jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    weights,
    parts,
    N,
    T,
    O,
    I,
    g_n,
    g_t,
    g_o,
    x_n,
    x_t,
    x_i,
    TILES_I,
    SAMPLES,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    o = (tile // TILES_I) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tile % TILES_I) * BLOCK_I + tl.arange(0, BLOCK_I)
    t = tl.arange(0, POSITIONS)
    found = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
    steps = tl.cdiv(T, POSITIONS)
    last = tl.minimum((piece + 1) * SAMPLES, N)
    for step in range(piece * SAMPLES * steps, last * steps):
        n = (step // steps).to(tl.int64)
        position = (step % steps) * POSITIONS + t
        weight = tl.load(weights + n)
        is_kept = (position < tl.where(weight != 0.0, T, 0))[:, None]
        g_at = g + n * g_n + position[:, None].to(tl.int64) * g_t + o[None, :] * g_o
        x_at = x + n * x_n + position[:, None].to(tl.int64) * x_t + i[None, :] * x_i
        a = tl.load(g_at, mask=is_kept & (o < O)[None, :], other=0.0)
        b = tl.load(x_at, mask=is_kept & (i < I)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32) * weight
            b = b.to(tl.float32)
        else:
            a = (a.to(tl.float32) * weight).to(a.dtype)
        found = tl.dot(tl.trans(a), b, found, input_precision=PRECISION)
    at = piece.to(tl.int64) * O * I + o[:, None].to(tl.int64) * I + i[None, :]
    tl.store(parts + at, found, mask=(o < O)[:, None] & (i < I)[None, :])


@operation(
    "weighted_outer_products",
    lambda g, x, weights: g.new_empty(g.shape[2], x.shape[2], dtype=torch.float32),
)
def weighted_outer_products(g: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Of g (n, t, o), x (n, t, i) and weights (n,): (o, i) in float32."""
    g, x = same_dtype(g, x)
    n, t, o = g.shape
    i = x.shape[2]
    is_half = g.dtype != torch.float32
    side = 128 if is_half else 64
    block_o, block_i = power_of_two(o, 16, side), power_of_two(i, 16, side)
    tiles_o, tiles_i = -(-o // block_o), -(-i // block_i)
    # As many pieces as keep every multiprocessor busy, twice.
    pieces = max(1, min(n, 2 * MULTIPROCESSORS // (tiles_o * tiles_i)))
    samples = -(-n // pieces)
    pieces = -(-n // samples)
    parts = torch.empty(pieces, o, i, device=g.device, dtype=torch.float32)
    _weighted_sum_kernel[(tiles_o * tiles_i, pieces)](
        g,
        x,
        weights.to(torch.float32),
        parts,
        n,
        t,
        o,
        i,
        *g.stride(),
        *x.stride(),
        tiles_i,
        samples,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        POSITIONS=power_of_two(t, 16, 64 if is_half else 32),
        PRECISION=float32_precision(),
        WIDEN=INTERPRETED,
        num_warps=8 if block_o * block_i >= 128 * 128 else 4,
        num_stages=3,
    )
    return parts[0] if pieces == 1 else parts.sum(0)
