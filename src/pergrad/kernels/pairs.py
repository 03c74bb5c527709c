"""Defines device functions for kernels over pairs of positions or over several problems."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["inner_products", "pair_of", "problem_of", "sum_of_parts"]


@triton.jit
def problem_of(program, problems, count, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finds the row of a program's problem; the last field of a row is its first program."""
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high + 1) // 2
        starts_later = tl.load(problems + middle * FIELDS + FIELDS - 1) > program
        high = tl.where(starts_later, middle - 1, high)
        low = tl.where(starts_later, low, middle)
    return low


@triton.jit
def pair_of(p):  # type: ignore[no-untyped-def]
    """Returns the p-th pair (i, j) with j <= i."""
    i = ((tl.sqrt(8.0 * p.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= p, i + 1, i)  # the root is rounded
    i = tl.where(i * (i + 1) // 2 > p, i - 1, i)
    return i, (p - i * (i + 1) // 2).to(tl.int32)


@triton.jit
def inner_products(  # type: ignore[no-untyped-def]
    start,
    rows_a,
    rows_b,
    row_stride,
    width,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """<v_a, v_b> of two blocks of aligned rows, all inside the tensor."""
    columns = tl.arange(0, COLUMNS)
    a_at = start + rows_a.to(tl.int64)[:, None] * row_stride + columns[None, :]
    b_at = start + rows_b.to(tl.int64)[:, None] * row_stride + columns[None, :]
    found = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for first in range(0, width, COLUMNS):
        is_inside = columns[None, :] < width - first
        a = tl.load(a_at, mask=is_inside, other=0.0)
        b = tl.load(b_at, mask=is_inside, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        found = tl.dot(a, tl.trans(b), found, input_precision=PRECISION)
        a_at += COLUMNS
        b_at += COLUMNS
    return found


@triton.jit
def sum_of_parts(at, count):  # type: ignore[no-untyped-def]
    """Sums `count` float64 numbers."""
    place = tl.arange(0, 128)
    found = tl.zeros((128,), dtype=tl.float64)
    for first in range(0, count, 128):
        found += tl.load(at + first + place, mask=place < count - first, other=0.0)
    return tl.sum(found, axis=0)
