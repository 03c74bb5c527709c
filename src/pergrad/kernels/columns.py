"""|Σ_t g_t|² and |Σ_t g_t ⊙ x_t|², of biases and of the scales of norm layers, several in one launch.

A program sums up some columns over all positions of a sample, and then their squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.launching import TYPES, operation, power_of_two, table_of
from pergrad.kernels.pairs import problem_of

__all__ = ["column_squared_norms", "neighbours_in"]

_FIELDS = tl.constexpr(12)


@triton.jit
def _columns_kernel(  # type: ignore[no-untyped-def]
    problems,
    count,
    parts,
    N,
    PARTS,
    G_TYPE: tl.constexpr,
    X_TYPE: tl.constexpr,
    HAS_X: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    problem = problem_of(program, problems, count, _FIELDS)
    row = problems + problem * _FIELDS
    g = tl.load(row).to(tl.pointer_type(G_TYPE))
    x = tl.load(row + 1).to(tl.pointer_type(X_TYPE))
    T = tl.load(row + 2).to(tl.int32)
    D = tl.load(row + 3).to(tl.int32)
    # Neighbours in memory are read by neighbouring threads: the compiler must know which they are.
    g_t = 1 if NEIGHBOURS == "positions" else tl.load(row + 5)
    x_t = 1 if NEIGHBOURS == "positions" else tl.load(row + 8)
    g_d = 1 if NEIGHBOURS == "columns" else tl.load(row + 6)
    x_d = 1 if NEIGHBOURS == "columns" else tl.load(row + 9)
    tiles = tl.load(row + 10).to(tl.int32)
    first = tl.load(row + 11).to(tl.int32)
    n = (program - first) // tiles
    tile = (program - first) % tiles
    d = tile * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, POSITIONS)
    g_at = g + n * tl.load(row + 4) + t[:, None] * g_t + d[None, :] * g_d
    x_at = x + n * tl.load(row + 7) + t[:, None] * x_t + d[None, :] * x_d
    found = tl.zeros((POSITIONS, COLUMNS), dtype=tl.float32)
    for start in range(0, T, POSITIONS):
        is_inside = (t < T - start)[:, None] & (d < D)[None, :]
        term = tl.load(g_at, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_X:
            term *= tl.load(x_at, mask=is_inside, other=0.0).to(tl.float32)
            x_at += POSITIONS * x_t
        found += term
        g_at += POSITIONS * g_t
    total = tl.sum(found, axis=0)
    tl.store(parts + (problem * N + n) * PARTS + tile, tl.sum(total * total, axis=0))


@operation(
    "column_squared_norms",
    lambda gs, xs: gs[0].new_empty(len(gs), len(gs[0]), dtype=torch.float64),
)
def column_squared_norms(gs: list[Tensor], xs: list[Tensor]) -> Tensor:
    """Of some g (n, t, d), of one type, and as many x, or none: (len(gs), n) in float64."""
    device, n = gs[0].device, len(gs[0])
    others = xs or gs
    sizes = [g.shape[1:] for g in gs]
    positions = power_of_two(max([t for t, _ in sizes]), 16, 256)
    columns = power_of_two(max([d for _, d in sizes]), 16, 32)
    of_g, of_x = [g.stride() for g in gs], [x.stride() for x in others]
    rows, programs, most = [], 0, 1
    for g, x, (t, d), g_strides, x_strides in zip(gs, others, sizes, of_g, of_x, strict=True):
        tiles = -(-d // columns)
        most = max(most, tiles)
        rows.append((g.data_ptr(), x.data_ptr(), t, d, *g_strides, *x_strides, tiles, programs))
        programs += n * tiles
    parts = torch.zeros(len(gs), n, most, device=device, dtype=torch.float64)
    _columns_kernel[(programs,)](
        table_of(rows, device),
        len(gs),
        parts,
        n,
        most,
        G_TYPE=TYPES[gs[0].dtype],
        X_TYPE=TYPES[others[0].dtype],
        HAS_X=bool(xs),
        NEIGHBOURS=neighbours_in([*of_g, *of_x]),
        POSITIONS=positions,
        COLUMNS=columns,
    )
    return parts.sum(2)


def neighbours_in(strides: Iterable[Sequence[int]]) -> str:
    """What lies side by side in all tensors of these strides: columns, positions, or neither."""
    _, of_positions, of_columns = zip(*strides, strict=True)
    if {*of_columns} == {1}:
        return "columns"
    return "positions" if {*of_positions} == {1} else "neither"
