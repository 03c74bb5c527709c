"""Σ_n c_n Σ_t g[n,t] ⊗ x[n,t] of several parameters, in one launch.

A program sums one tile of one parameter, sample by sample, each times its weight in float32. A sample of
weight zero is not read, so it adds nothing even if it is not finite.

The kernel also corrects sums of another origin: it recomputes tiles that are not finite if some sample has
weight zero, and does nothing otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import (
    INTERPRETED,
    MULTIPROCESSORS,
    TYPES,
    Kernel,
    MemoryPlace,
    cached_by_place,
    places,
    power_of_two,
    precision_of,
    with_aligned_rows,
)
from pergrad.kernels.pairs import problem_of
from pergrad.kernels.tables import Problems, problems_of, table_of
from pergrad.runtime import operation

__all__ = ["mend_weighted_outer_products", "weighted_outer_products"]

_FIELDS = tl.constexpr(12)


@Kernel
@triton.jit
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    problems,
    count,
    weights,
    N,
    TILES,
    TYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    POSITIONS: tl.constexpr,
    SAMPLES: tl.constexpr,
    ONLY_MENDS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tiles = TILES
    if ONLY_MENDS:
        left_out = 0
        for one in range(0, N, SAMPLES):
            some = one + tl.arange(0, SAMPLES)
            given = tl.load(weights + some, mask=some < N, other=1.0)
            left_out += tl.sum((given == 0.0).to(tl.int32), 0)
        tiles = tl.where(left_out > 0, TILES, 0)
    for program in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = problems + problem_of(program, problems, count, _FIELDS) * _FIELDS
        g = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)), 16)
        x = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TYPE)), 16)
        out = tl.load(row + 2).to(tl.pointer_type(tl.float32))
        T = tl.load(row + 3).to(tl.int32)
        O = tl.load(row + 4).to(tl.int32)
        I = tl.load(row + 5).to(tl.int32)
        g_n = tl.multiple_of(tl.load(row + 6), ALIGNMENT)
        g_t = tl.multiple_of(tl.load(row + 7), ALIGNMENT)
        x_n = tl.multiple_of(tl.load(row + 8), ALIGNMENT)
        x_t = tl.multiple_of(tl.load(row + 9), ALIGNMENT)
        tiles_i = tl.load(row + 10).to(tl.int32)
        tile = program - tl.load(row + 11).to(tl.int32)
        o = (tile // tiles_i) * BLOCK_O + tl.arange(0, BLOCK_O)
        i = (tile % tiles_i) * BLOCK_I + tl.arange(0, BLOCK_I)
        # Beyond the last row or column, values are read but never stored.
        o_at = tl.max_contiguous(tl.multiple_of(tl.where(o < O, o, 0), ALIGNMENT), ALIGNMENT)
        i_at = tl.max_contiguous(tl.multiple_of(tl.where(i < I, i, 0), ALIGNMENT), ALIGNMENT)
        t = tl.arange(0, POSITIONS)
        out_at = out + o[:, None].to(tl.int64) * I + i[None, :]
        is_stored = (o < O)[:, None] & (i < I)[None, :]
        samples = N
        if ONLY_MENDS:
            before = tl.load(out_at, mask=is_stored, other=0.0)
            finite = tl.sum(tl.sum((tl.abs(before) < float("inf")).to(tl.int32), 1), 0)
            samples = tl.where(finite < BLOCK_O * BLOCK_I, N, 0)
            is_stored = is_stored & (samples > 0)
        total = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
        for n in range(0, samples):
            weight = tl.load(weights + n).to(tl.float32)
            length = tl.where(weight != 0.0, T, 0)
            of_sample = tl.zeros((BLOCK_O, BLOCK_I), dtype=tl.float32)
            for first in range(0, length, POSITIONS):
                at = (first + t).to(tl.int64)[:, None]
                is_position = at < T
                a = tl.load(g + n * g_n + at * g_t + o_at[None, :], mask=is_position, other=0.0)
                b = tl.load(x + n * x_n + at * x_t + i_at[None, :], mask=is_position, other=0.0)
                if WIDEN:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                of_sample = tl.dot(tl.trans(a), b, of_sample, input_precision=PRECISION)
            total += of_sample * weight
        tl.store(out_at, total, mask=is_stored)


@operation(
    "weighted_outer_products",
    lambda gs, xs, weights: [
        g.new_empty(g.shape[2], x.shape[2], dtype=torch.float32)
        for g, x in zip(gs, xs, strict=True)
    ],
)
def weighted_outer_products(gs: list[Tensor], xs: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Computes the sums of several g (n, t, o) and x (n, t, i) of one dtype: (o, i) in float32 each."""
    sums = [
        torch.empty(g.shape[2], x.shape[2], device=g.device, dtype=torch.float32)
        for g, x in zip(gs, xs, strict=True)
    ]
    _launch(sums, gs, xs, weights, only_mends=False)
    return sums


@operation(
    "mend_weighted_outer_products", lambda sums, gs, xs, weights: None, mutates_args=("sums",)
)
def mend_weighted_outer_products(
    sums: list[Tensor], gs: list[Tensor], xs: list[Tensor], weights: Tensor
) -> None:
    """Recomputes, in place, tiles of `sums` that are not finite, if any sample has weight zero."""
    _launch(sums, gs, xs, weights, only_mends=True)


class _Plan(NamedTuple):
    problems: Problems
    tiles: int
    settings: dict[str, int]


@cached_by_place
def _plan(
    gs: tuple[MemoryPlace, ...],
    xs: tuple[MemoryPlace, ...],
    sums: tuple[MemoryPlace, ...],
    dtype: torch.dtype,
) -> _Plan:
    """Plans a launch: a row for each sum."""
    is_half = dtype.itemsize == 2
    side = 128 if is_half else 64
    block_o = power_of_two(max(o for _, (_, _, o), _ in gs), 16, side)
    block_i = power_of_two(max(i for _, (_, _, i), _ in xs), 16, side)
    rows, tiles = [], 0
    for g, x, total in zip(gs, xs, sums, strict=True):
        (at_g, (_, t, _), (g_n, g_t, _)), (at_x, _, (x_n, x_t, _)) = g, x
        at, (o, i), _ = total
        tiles_i = -(-i // block_i)
        rows.append((at_g, at_x, at, t, o, i, g_n, g_t, x_n, x_t, tiles_i, tiles))
        tiles += -(-o // block_o) * tiles_i
    longest = max(t for _, (_, t, _), _ in gs)
    settings = {
        "BLOCK_O": block_o,
        "BLOCK_I": block_i,
        "POSITIONS": power_of_two(longest, 16, 64 if is_half else 32),
        "num_warps": 8 if block_o * block_i >= 128 * 128 else 4,
    }
    return _Plan(problems_of(rows), tiles, settings)


def _launch(
    sums: list[Tensor], gs: list[Tensor], xs: list[Tensor], weights: Tensor, *, only_mends: bool
) -> None:
    device, dtype = gs[0].device, gs[0].dtype
    # Keep copies alive until the kernel has read them.
    (gs, at_gs), (xs, at_xs) = with_aligned_rows(gs), with_aligned_rows(xs)
    problems, tiles, settings = _plan(at_gs, at_xs, places(sums), dtype)
    # Usually there is nothing to correct: one program per multiprocessor checks all tiles.
    programs = min(tiles, MULTIPROCESSORS) if only_mends else tiles
    _weighted_sum_kernel(
        programs,
        table_of(problems, device),
        len(gs),
        weights,
        len(weights),
        tiles,
        TYPE=TYPES[dtype],
        ALIGNMENT=16 // dtype.itemsize,
        SAMPLES=power_of_two(len(weights), 16, 1024),
        ONLY_MENDS=only_mends,
        PRECISION=precision_of(dtype),
        WIDEN=INTERPRETED,
        num_stages=3,
        **settings,
    )
