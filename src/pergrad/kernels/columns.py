"""|Σ_t g_t|² and |Σ_t g_t ⊙ x_t|², for biases and scales of norm layers, several in one launch.

A program sums some columns over all positions of a sample, and then their squares. If x has statistics, the
kernel reads (x - mean) / std instead; they belong to a position or to a group of columns. For a g with an x,
it can also sum g alone. It writes the sums, which are the gradients, on request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import TYPES, Kernel, MemoryPlace, cached_by_place, places
from pergrad.kernels.pairs import problem_of
from pergrad.kernels.tables import Problems, problems_of, table_of
from pergrad.runtime import operation

__all__ = ["column_squared_norms", "column_sums"]

_FIELDS = tl.constexpr(21)
_Neighbours = Literal["columns", "positions", "neither"]
_Statistics = Literal["positions", "columns"]  # what each has its own
# Layout of a problem: of g, of x, whether wide loads can read both, the statistics of x, and whether offsets
# within a sample need 64 bits.
_MemoryLayout = tuple[_Neighbours, _Neighbours | None, bool, _Statistics | None, bool]


@Kernel
@triton.jit
def _columns_kernel(  # type: ignore[no-untyped-def]
    problems,
    count,
    parts,
    sums,
    N,
    PARTS,
    WIDTH,
    G_TYPE: tl.constexpr,
    X_TYPE: tl.constexpr,
    G_NEIGHBOURS: tl.constexpr,
    X_NEIGHBOURS: tl.constexpr,  # None: there is no x
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # that strides and the size of the adjacent dimension are multiples of
    BYTES: tl.constexpr,  # that addresses are multiples of
    STATISTICS: tl.constexpr,  # what each has its own: "positions", "columns" in groups, None
    SUMS_ALONE: tl.constexpr,  # whether there is a g to be summed up without its x too
    KEEPS_SUMS: tl.constexpr,
    OFFSETS: tl.constexpr,  # the type of offsets within a block
    STAGES: tl.constexpr,  # blocks that are loaded ahead
):
    program = tl.program_id(0)
    row = problems + problem_of(program, problems, count, _FIELDS) * _FIELDS
    g = tl.multiple_of(tl.load(row).to(tl.pointer_type(G_TYPE)), BYTES)
    x = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(X_TYPE)), BYTES)
    T = tl.load(row + 2).to(tl.int32)
    D = tl.load(row + 3).to(tl.int32)
    if G_NEIGHBOURS == "positions":
        T = tl.multiple_of(T, ALIGNMENT)
    else:
        D = tl.multiple_of(D, ALIGNMENT)
    # Adjacent threads read adjacent memory: the compiler must know which dimension that is.
    g_n = tl.multiple_of(tl.load(row + 4), ALIGNMENT)
    x_n = tl.multiple_of(tl.load(row + 7), ALIGNMENT)
    g_t = 1
    if G_NEIGHBOURS != "positions":
        g_t = tl.multiple_of(tl.load(row + 5).to(OFFSETS), ALIGNMENT)
    x_t = 1
    if X_NEIGHBOURS != "positions":
        x_t = tl.multiple_of(tl.load(row + 8).to(OFFSETS), ALIGNMENT)
    g_d = 1
    if G_NEIGHBOURS != "columns":
        g_d = tl.multiple_of(tl.load(row + 6).to(OFFSETS), ALIGNMENT)
    x_d = 1
    if X_NEIGHBOURS != "columns":
        x_d = tl.multiple_of(tl.load(row + 9).to(OFFSETS), ALIGNMENT)
    place = tl.load(row + 10)
    place_of_sum = tl.load(row + 11)
    column = tl.load(row + 12)
    column_of_sum = tl.load(row + 13)
    mean = tl.load(row + 14).to(tl.pointer_type(tl.float32))
    inverse = tl.load(row + 15).to(tl.pointer_type(tl.float32))
    groups = tl.load(row + 16).to(tl.int32)
    mean_n = tl.load(row + 17)
    inverse_n = tl.load(row + 18)
    tiles = tl.load(row + 19).to(tl.int32)
    first = tl.load(row + 20).to(tl.int32)
    n = (program - first) // tiles
    tile = (program - first) % tiles
    d = tile * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, POSITIONS)
    # Pointers move by a scalar: a tensor of 64-bit addresses that moves would take most of the registers.
    g_at = t[:, None] * g_t + d[None, :] * g_d
    x_at = t[:, None] * x_t + d[None, :] * x_d
    g += n * g_n
    x += n * x_n
    found = tl.zeros((POSITIONS, COLUMNS), dtype=tl.float32)
    alone = tl.zeros((POSITIONS, COLUMNS), dtype=tl.float32)
    if STATISTICS == "columns":
        of_column = d // (D // groups)
        center = tl.load(mean + n * mean_n + of_column, mask=d < D, other=0.0)[None, :]
        factor = tl.load(inverse + n * inverse_n + of_column, mask=d < D, other=0.0)[None, :]
    for start in tl.range(0, T, POSITIONS, num_stages=STAGES):
        is_inside = (t < T - start)[:, None] & (d < D)[None, :]
        term = tl.load(g + g_at, mask=is_inside, other=0.0).to(tl.float32)
        if SUMS_ALONE:
            alone += term
        if X_NEIGHBOURS is not None:
            other = tl.load(x + x_at, mask=is_inside, other=0.0).to(tl.float32)
            if STATISTICS == "positions":
                at = n * T + start + t
                is_position = t < T - start
                center = tl.load(mean + at, mask=is_position, other=0.0)[:, None]
                factor = tl.load(inverse + at, mask=is_position, other=0.0)[:, None]
            if STATISTICS is not None:
                other = (other - center) * factor
            term *= other
            x += POSITIONS * x_t
        found += term
        g += POSITIONS * g_t
    total = tl.sum(found, axis=0)
    tl.store(parts + (place * N + n) * PARTS + tile, tl.sum(total * total, axis=0))
    if SUMS_ALONE:
        of_g = tl.sum(alone, axis=0)
        at = parts + (tl.maximum(place_of_sum, 0) * N + n) * PARTS + tile
        tl.store(at, tl.sum(of_g * of_g, axis=0), mask=place_of_sum >= 0)
        if KEEPS_SUMS:
            is_kept = (d < D) & (place_of_sum >= 0)
            tl.store(sums + n.to(tl.int64) * WIDTH + column_of_sum + d, of_g, mask=is_kept)
    if KEEPS_SUMS:
        tl.store(sums + n.to(tl.int64) * WIDTH + column + d, total, mask=d < D)


def _like_norms(
    gs: list[Tensor], xs: list[Tensor], statistics: list[Tensor], summed: Sequence[int]
) -> Tensor:
    return gs[0].new_empty(len(gs) + len(summed), len(gs[0]), dtype=torch.float64)


@operation("column_squared_norms", _like_norms)
def column_squared_norms(
    gs: list[Tensor], xs: list[Tensor], statistics: list[Tensor], summed: Sequence[int]
) -> Tensor:
    """|Σ_t g ⊙ x|², or |Σ_t g|² without `xs`; then |Σ_t g|² for each g numbered in `summed`.

    All g (n, t, d) have one dtype. `statistics` are the means of all x and then 1 / std of all x, (n, t, 1)
    or (n, 1, groups), or empty. Returns (len(gs) + len(summed), n) in float64.
    """
    return _launch(gs, xs, statistics, summed, None)


def _like_sums(
    gs: list[Tensor], xs: list[Tensor], statistics: list[Tensor], summed: Sequence[int]
) -> tuple[Tensor, Tensor]:
    sums = gs[0].new_empty(len(gs[0]), sum(_widths(gs, summed)), dtype=torch.float32)
    return sums, _like_norms(gs, xs, statistics, summed)


@operation("column_sums", _like_sums)
def column_sums(
    gs: list[Tensor], xs: list[Tensor], statistics: list[Tensor], summed: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns the concatenated sums, (n, Σ d) in float32, and the results of `column_squared_norms`."""
    width = sum(_widths(gs, summed))
    sums = torch.empty(len(gs[0]), width, device=gs[0].device, dtype=torch.float32)
    return sums, _launch(gs, xs, statistics, summed, sums)


def _widths(gs: list[Tensor], summed: Sequence[int]) -> list[int]:
    return [g.shape[2] for g in gs] + [gs[k].shape[2] for k in summed]


def _launch(
    gs: list[Tensor],
    xs: list[Tensor],
    statistics: list[Tensor],
    summed: Sequence[int],
    sums: Tensor | None,
) -> Tensor:
    """Launches the kernel once for each memory layout; a compiler may have chosen several."""
    first, other, n = gs[0], (xs or gs)[0], len(gs[0])
    device = first.device
    statistics = [t if _is_readable(t) else t.to(torch.float32).contiguous() for t in statistics]
    plan = _plan(places(gs), places(xs), places(statistics), tuple(summed))
    parts = torch.zeros(len(gs) + len(summed), n, plan.most, device=device, dtype=torch.float64)
    for problems, programs, settings in plan.launches:
        _columns_kernel(
            programs,
            table_of(problems, device),
            problems.rows,
            parts,
            parts if sums is None else sums,
            n,
            plan.most,
            plan.width,
            G_TYPE=TYPES[first.dtype],
            X_TYPE=TYPES[other.dtype],
            SUMS_ALONE=len(summed) > 0,
            KEEPS_SUMS=sums is not None,
            **settings,
        )
    return parts.sum(2)


class _Plan(NamedTuple):
    launches: list[tuple[Problems, int, dict[str, Any]]]  # with the number of programs
    most: int  # largest number of programs of a sample
    width: int  # of all sums, concatenated


@cached_by_place
def _plan(
    gs: tuple[MemoryPlace, ...],
    xs: tuple[MemoryPlace, ...],
    statistics: tuple[MemoryPlace, ...],
    summed: tuple[int, ...],
) -> _Plan:
    """Plans the launches: problems grouped by their memory layout."""
    widths = [shape[2] for _, shape, _ in gs] + [gs[k][1][2] for k in summed]
    columns_before = [0, *accumulate(widths)]
    place_of_sum = {number: place for place, number in enumerate(summed, len(gs))}
    layouts: dict[_MemoryLayout, list[tuple[int, ...]]] = defaultdict(list)
    for k, (g, x) in enumerate(zip(gs, xs or gs, strict=True)):
        (at_g, (_, t, d), of_g), (at_x, _, of_x) = g, x
        addresses, numbers = (at_g, at_x), (k, place_of_sum.get(k, -1))
        before = [columns_before[number] for number in numbers]  # not read if there is no sum
        in_g, in_x = _neighbours_in(d, of_g), _neighbours_in(d, of_x) if xs else None
        is_aligned = _is_aligned(in_g, in_x, addresses, (t, d), (of_g, of_x))
        of_x_at, kind, groups = _statistics_of(statistics[k :: len(gs)])
        problem = (*addresses, t, d, *of_g, *of_x, *numbers, *before, *of_x_at, *groups)
        is_far = any(_is_far(t, d, strides) for strides in (of_g, of_x))
        layouts[in_g, in_x, is_aligned, kind, is_far].append(problem)
    launches, n = [], gs[0][1][0]
    for layout, problems in layouts.items():
        settings = _settings(*layout)
        rows, programs = [], 0
        for problem in problems:
            tiles = -(-problem[3] // settings["COLUMNS"])
            rows.append((*problem, tiles, programs))
            programs += n * tiles
        launches.append((problems_of(rows), programs, settings))
    return _Plan(launches, -(-max(widths) // _LEAST_COLUMNS), columns_before[-1])


def _is_far(positions: int, columns: int, strides: tuple[int, ...]) -> bool:
    """Whether an offset within a sample, and within the blocks that its end is in, needs 64 bits."""
    _, of_position, of_column = strides
    return (positions + _MOST) * of_position + (columns + _MOST) * of_column >= 2**31


def _settings(
    in_g: _Neighbours,
    in_x: _Neighbours | None,
    is_aligned: bool,
    kind: _Statistics | None,
    is_far: bool,
) -> dict[str, Any]:
    positions, columns, warps, stages = _block(in_g, in_x, is_aligned)
    return {
        "G_NEIGHBOURS": in_g,
        "X_NEIGHBOURS": in_x,
        "POSITIONS": positions,
        "COLUMNS": columns,
        "ALIGNMENT": 8 if is_aligned else 1,
        "BYTES": 16 if is_aligned else 1,
        "STATISTICS": kind,
        "OFFSETS": tl.int64 if is_far else tl.int32,
        "STAGES": stages,
        "num_warps": warps,
    }


def _is_readable(statistics: Tensor) -> bool:
    """Whether the kernel can read them as they are; all samples may share those of columns."""
    is_shared = statistics.stride(0) == 0 and statistics.shape[1] == 1
    own = statistics[:1] if is_shared else statistics
    return statistics.dtype == torch.float32 and own.is_contiguous()


def _statistics_of(
    both: Sequence[MemoryPlace],
) -> tuple[tuple[int, int], _Statistics | None, tuple[int, int, int]]:
    """Returns the addresses of mean and 1 / std, what they belong to, and their groups and strides."""
    if not both:
        return (0, 0), None, (1, 0, 0)
    (at_mean, (_, positions, groups), of_mean), (at_inverse, _, of_inverse) = both
    kind: _Statistics = "columns" if positions == 1 else "positions"
    return (at_mean, at_inverse), kind, (groups, of_mean[0], of_inverse[0])


def _neighbours_in(columns: int, strides: tuple[int, ...]) -> _Neighbours:
    """Finds the contiguous dimension of (n, t, columns)."""
    _, of_position, of_column = strides
    if of_column == 1 and (columns > 1 or of_position != 1):
        return "columns"
    return "positions" if of_position == 1 else "neither"


def _is_aligned(
    in_g: _Neighbours,
    in_x: _Neighbours | None,
    addresses: Sequence[int],
    shape: tuple[int, int],
    strides: Sequence[tuple[int, ...]],
) -> bool:
    """Whether wide loads can read adjacent columns, or adjacent positions."""
    if in_g == "neither" or in_x not in (None, in_g):
        return False
    size = shape[1] if in_g == "columns" else shape[0]
    others = [s for each in strides for s in (each[0], each[1 if in_g == "columns" else 2])]
    return not any([at % 16 for at in addresses] + [number % 8 for number in (size, *others)])


_LEAST_COLUMNS, _MOST = 32, 64  # columns of a block; positions or columns of one


def _block(
    of_g: _Neighbours, of_x: _Neighbours | None, is_aligned: bool
) -> tuple[int, int, int, int]:
    """Returns positions and columns of a block, warps and stages; measured as the fastest on an H200.

    Loading ahead takes seven times as long where wide loads are impossible.
    """
    if of_g != (of_x or of_g):
        return 32, 32, 4, 1
    if of_g != "columns":
        return 64, _LEAST_COLUMNS, 4, 1
    if of_x is None:
        return 64, 64, 4, 3 if is_aligned else 1
    return 32, 64, 4, 1
