"""|Σ_t g_t ⊗ x_t|² = Σ_ts <g_t, g_s> <x_t, x_s>, of every sample of several parameters, in one launch.

A program computes one block of both matrices of inner products, in registers, and sums up their product;
of two blocks that mirror each other only one is computed. No matrix is ever written.
"""

from __future__ import annotations

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import (
    INTERPRETED,
    MULTIPROCESSORS,
    TYPES,
    Kernel,
    aligned_rows,
    float32_precision,
    operation,
    pair_count,
    power_of_two,
)
from pergrad.kernels.pairs import inner_products, pair_of, problem_of
from pergrad.kernels.tables import table_of

__all__ = ["gram_microseconds", "gram_squared_norms"]

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
    at = (place * N + n) * PARTS + pair
    tl.store(parts + at, tl.where(i == j, total, 2.0 * total))


@operation(
    "gram_squared_norms",
    lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
def gram_squared_norms(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Of some g (n, t, o) and x (n, t, i), all of one type: (len(gs), n) in float64."""
    device, dtype, n = gs[0].device, gs[0].dtype, len(gs[0])
    alignment = 16 // dtype.itemsize
    aligned, problems = [], []  # copies must be there until they have been read
    for place, pair in enumerate(zip(gs, xs, strict=True)):
        (g, at_g, g_n, g_t), (x, at_x, x_n, x_t) = map(aligned_rows, pair)
        aligned.append((g, x))
        _, t, o = g.shape
        problems.append((at_g, at_x, t, o, x.shape[2], g_n, g_t, x_n, x_t, place))
    block, columns, warps, stages = _blocks(max([p[2] for p in problems]), dtype)
    rows, programs, most = [], 0, 1
    # The longest first: the shorter ones fill up what is left at the end.
    for problem in sorted(problems, key=lambda p: -p[3] - p[4]):
        pairs = pair_count(problem[2], block)
        most = max(most, pairs)
        rows.append((*problem, pairs, programs))
        programs += n * pairs
    parts = torch.zeros(len(gs), n, most, device=device, dtype=torch.float64)
    _gram_kernel(
        programs,
        table_of(rows, device),
        len(gs),
        parts,
        n,
        most,
        TYPE=TYPES[dtype],
        ALIGNMENT=alignment,
        BLOCK=block,
        COLUMNS=columns,
        PRECISION=float32_precision(),
        WIDEN=INTERPRETED,
        num_warps=warps,
        num_stages=stages,
    )
    return parts.sum(2)


def gram_microseconds(
    n: int, t: int, o: int, i: int, dtype: torch.dtype, *, is_alone: bool = False
) -> float:
    """What it costs on an H200; alone, its last programs leave the others idle."""
    block = _blocks(t, dtype)[0]
    waves = n * pair_count(t, block) / MULTIPROCESSORS
    return (ceil(waves) if is_alone else waves) * block**2 * (o + i) / _RATES[dtype.itemsize]


# Multiplications a microsecond of one multiprocessor, by the bytes of a number.
_RATES = {2: 1.8e6, 4: 2.0e5}


def _blocks(t: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Positions and columns of a block, warps, and steps in flight."""
    if dtype == torch.float32:
        return power_of_two(t, 16, 64), 32, 4, 3
    if t <= 64:
        return power_of_two(t, 16, 64), 64, 4, 4
    return 128, 64, 8, 4
