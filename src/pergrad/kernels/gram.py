"""|Σ_t g_t ⊗ x_t|² = Σ_ts <g_t, g_s> <x_t, x_s>, for every sample of several parameters, in one launch.

A program computes one block of both matrices of inner products in registers and sums their product; of two
blocks that mirror each other only one is computed. No matrix is written.

Where positions cancel, only the rounding of the terms is left of the sum. A second kernel finds such samples
and recomputes them from their gradients, one program each, without synchronising with the host.
"""

from __future__ import annotations

from math import ceil
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
    float32_precision,
    pair_count,
    power_of_two,
    precision_of,
    same_dtype,
    with_aligned_rows,
)
from pergrad.kernels.pairs import inner_products, pair_of, problem_of, sum_of_parts
from pergrad.kernels.tables import Problems, problems_of, table_of
from pergrad.runtime import least_trusted, operation

__all__ = ["gram_microseconds", "gram_squared_norms", "mended_squared_norms"]

_FIELDS = tl.constexpr(12)


@Kernel
@triton.jit
def _gram_kernel(  # type: ignore[no-untyped-def]
    problems,
    count,
    parts,
    N,
    PARTS,
    TYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    problem = problem_of(program, problems, count, _FIELDS)
    row = problems + problem * _FIELDS
    g = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)), 16)
    x = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TYPE)), 16)
    T = tl.load(row + 2).to(tl.int32)
    O = tl.multiple_of(tl.load(row + 3).to(tl.int32), ALIGNMENT)
    I = tl.multiple_of(tl.load(row + 4).to(tl.int32), ALIGNMENT)
    g_n = tl.multiple_of(tl.load(row + 5), ALIGNMENT)
    g_t = tl.multiple_of(tl.load(row + 6), ALIGNMENT)
    x_n = tl.multiple_of(tl.load(row + 7), ALIGNMENT)
    x_t = tl.multiple_of(tl.load(row + 8), ALIGNMENT)
    place = tl.load(row + 9)
    pairs = tl.load(row + 10).to(tl.int32)
    first = tl.load(row + 11).to(tl.int32)
    n = (program - first) // pairs
    pair = (program - first) % pairs
    i, j = pair_of(pair)
    a = i * BLOCK + tl.arange(0, BLOCK)
    b = j * BLOCK + tl.arange(0, BLOCK)
    at_a = tl.minimum(a, T - 1)
    at_b = tl.minimum(b, T - 1)
    of_x = inner_products(x + n * x_n, at_a, at_b, x_t, I, BLOCK, COLUMNS, PRECISION, WIDEN)
    of_g = inner_products(g + n * g_n, at_a, at_b, g_t, O, BLOCK, COLUMNS, PRECISION, WIDEN)
    products = tl.where((a < T)[:, None] & (b < T)[None, :], of_x * of_g, 0.0)
    total = tl.sum(tl.sum(products, axis=1), axis=0)
    squares = tl.where(a[:, None] == b[None, :], products, 0.0)
    at = parts + (place * N + n) * PARTS + pair
    tl.store(at, tl.where(i == j, total, 2.0 * total))
    tl.store(at + count * N * PARTS, tl.sum(tl.sum(squares, axis=1), axis=0))


@Kernel
@triton.jit
def _mend_kernel(  # type: ignore[no-untyped-def]
    problems,
    count,
    parts,
    found,
    N,
    PARTS,
    TYPE: tl.constexpr,
    BYTES: tl.constexpr,  # that addresses are multiples of
    ALIGNMENT: tl.constexpr,  # numbers that strides are multiples of
    LEAST: tl.constexpr,
    SIDE: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    for job in range(tl.program_id(0), count * N, tl.num_programs(0)):
        row = problems + (job // N) * _FIELDS
        n = job % N
        at = tl.load(row + 9) * N + n
        pairs = tl.load(row + 10).to(tl.int32)
        sum_of_pairs = sum_of_parts(parts + at * PARTS, pairs)
        terms = sum_of_parts(parts + (count * N + at) * PARTS, pairs)
        is_good = sum_of_pairs >= LEAST * terms
        g = tl.multiple_of(tl.load(row).to(tl.pointer_type(TYPE)), BYTES)
        x = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(TYPE)), BYTES)
        T = tl.load(row + 2).to(tl.int32)
        O = tl.load(row + 3).to(tl.int32)
        I = tl.load(row + 4).to(tl.int32)
        g += n * tl.multiple_of(tl.load(row + 5), ALIGNMENT)
        x += n * tl.multiple_of(tl.load(row + 7), ALIGNMENT)
        g_t = tl.multiple_of(tl.load(row + 6), ALIGNMENT)
        x_t = tl.multiple_of(tl.load(row + 8), ALIGNMENT)
        columns = tl.cdiv(I, SIDE)
        tiles = tl.where(is_good, 0, tl.cdiv(O, SIDE) * columns)
        total = tl.zeros((SIDE,), dtype=tl.float64)
        for tile in range(0, tiles):
            o = (tile // columns) * SIDE + tl.arange(0, SIDE)
            i = (tile % columns) * SIDE + tl.arange(0, SIDE)
            gradient = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            for first in range(0, T, POSITIONS):
                t = (first + tl.arange(0, POSITIONS)).to(tl.int64)[:, None]
                a = tl.load(g + t * g_t + o[None, :], mask=(t < T) & (o < O)[None, :], other=0.0)
                b = tl.load(x + t * x_t + i[None, :], mask=(t < T) & (i < I)[None, :], other=0.0)
                if WIDEN:
                    a = a.to(tl.float32)
                    b = b.to(tl.float32)
                gradient = tl.dot(tl.trans(a), b, gradient, input_precision=PRECISION)
            total += tl.sum(gradient * gradient, axis=1).to(tl.float64)
        tl.store(found + at, tl.where(is_good, sum_of_pairs, tl.sum(total, axis=0)))


@operation(
    "gram_squared_norms",
    lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
def gram_squared_norms(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Computes squared norms from g (n, t, o) and x (n, t, i) of one dtype: (len(gs), n) in float64."""
    device, dtype, n = gs[0].device, gs[0].dtype, len(gs[0])
    # Keep copies alive until the kernel has read them.
    (gs, at_gs), (xs, at_xs) = with_aligned_rows(gs), with_aligned_rows(xs)
    problems, programs, most, settings = _plan(at_gs, at_xs, dtype)
    table = table_of(problems, device)
    # For each block, its sum and the sum of its diagonal.
    parts = torch.empty(2, len(gs), n, most, device=device, dtype=torch.float64)
    _gram_kernel(
        programs,
        table,
        len(gs),
        parts,
        n,
        most,
        TYPE=TYPES[dtype],
        ALIGNMENT=16 // dtype.itemsize,
        PRECISION=precision_of(dtype),
        WIDEN=INTERPRETED,
        **settings,
    )
    return _mended(table, parts, dtype)


@operation("mended_squared_norms", lambda found, terms, g, x: torch.empty_like(found))
def mended_squared_norms(found: Tensor, terms: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Recomputes `found`, (n,) in float64, from the gradients where its terms cancelled."""
    g, x = (t if t.stride(2) == 1 else t.contiguous() for t in same_dtype(g, x))
    (g_n, g_t, _), (x_n, x_t, _) = g.stride(), x.stride()
    rows = [(g.data_ptr(), x.data_ptr(), *g.shape[1:], x.shape[2], g_n, g_t, x_n, x_t, 0, 1, 0)]
    parts = torch.stack([found, terms])[:, None, :, None]
    return _mended(table_of(problems_of(rows), g.device), parts, g.dtype, byte_alignment=1)[0]


class _Plan(NamedTuple):
    problems: Problems
    programs: int
    most: int  # programs of one sample
    settings: dict[str, int]


@cached_by_place
def _plan(gs: tuple[MemoryPlace, ...], xs: tuple[MemoryPlace, ...], dtype: torch.dtype) -> _Plan:
    """Plans a launch: a row for each pair of g and x."""
    settings = _blocks(max(t for _, (_, t, _), _ in gs), dtype)
    problems = []
    for number, (g, x) in enumerate(zip(gs, xs, strict=True)):
        (at_g, (n, t, o), (g_n, g_t, _)), (at_x, (_, _, i), (x_n, x_t, _)) = g, x
        problems.append((at_g, at_x, t, o, i, g_n, g_t, x_n, x_t, number))
    rows = []
    programs, most = 0, 1
    # The longest first, so that short ones fill the last wave.
    for problem in sorted(problems, key=lambda p: -p[3] - p[4]):
        of_sample = pair_count(problem[2], settings["BLOCK"])
        most = max(most, of_sample)
        rows.append((*problem, of_sample, programs))
        programs += n * of_sample
    return _Plan(problems_of(rows), programs, most, settings)


def _mended(
    table: Tensor, parts: Tensor, dtype: torch.dtype, *, byte_alignment: int = 16
) -> Tensor:
    """Sums parts[0] to (problems, n); recomputes from the gradients where the terms, parts[1], cancelled."""
    _, count, n, most = parts.shape
    found = parts.new_empty(count, n)
    _mend_kernel(
        min(count * n, MULTIPROCESSORS),
        table,
        count,
        parts,
        found,
        n,
        most,
        TYPE=TYPES[dtype],
        BYTES=byte_alignment,
        ALIGNMENT=max(1, byte_alignment // dtype.itemsize),
        LEAST=least_trusted(torch.float32),
        SIDE=64,
        POSITIONS=32,
        PRECISION=precision_of(dtype),
        WIDEN=INTERPRETED,
        num_warps=4,
        num_stages=2,
    )
    return found


def gram_microseconds(
    n: int, t: int, o: int, i: int, dtype: torch.dtype, *, is_alone: bool = False
) -> float:
    """Estimates the time on an H200; alone, the last wave of programs leaves multiprocessors idle."""
    block = _blocks(t, dtype)["BLOCK"]
    waves = n * pair_count(t, block) / MULTIPROCESSORS
    rate = _FLOAT32_RATES[float32_precision()] if dtype == torch.float32 else _RATE
    return (ceil(waves) if is_alone else waves) * block**2 * (o + i) / rate


# Multiplications per microsecond of one multiprocessor: in half precision, and in float32 by its precision.
_RATE = 1.8e6
_FLOAT32_RATES = {"tf32x3": 2.0e5, "ieee": 5.2e4}


def _blocks(t: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns positions and columns of a block, warps and pipeline stages."""
    if dtype == torch.float32:
        return _settings(power_of_two(t, 16, 64), 32, 4, 3)
    if t <= 64:
        return _settings(power_of_two(t, 16, 64), 64, 4, 4)
    return _settings(128, 64, 8, 4)


def _settings(block: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK": block, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}
