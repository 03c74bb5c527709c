"""|G_n|² of a convolution's kernel, G_n[o, c, k] = Σ_p g[n,o,p] x[n, c, stride·p + dilation·k - padding].

Windows are never copied: they are read from the input (an implicit GEMM), channels last. By tiles, a program
computes one tile of the gradient and sums its squares. By pairs, it computes
Σ_pq <g_p, g_q> <window_p, window_q> for two blocks of positions; sums that cancelled are recomputed by tiles.
A convolution of one tap is an outer product over positions, whose kernels do not look for windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.gram import gram_microseconds, gram_squared_norms
from pergrad.kernels.launching import (
    INTERPRETED,
    MULTIPROCESSORS,
    Kernel,
    float32_precision,
    pair_count,
    power_of_two,
    same_dtype,
)
from pergrad.kernels.pairs import inner_products, pair_of, sum_of_parts
from pergrad.kernels.tile import tile_microseconds, tile_squared_norms
from pergrad.runtime import least_trusted, operation

__all__ = [
    "channels_last",
    "convolution_by_gram",
    "convolution_by_tiles",
    "convolution_gram_is_cheaper",
    "convolution_gram_microseconds",
    "convolution_tile_microseconds",
    "geometry_of",
    "one_tap_microseconds",
]


@triton.jit
def _quotient(a, b):  # type: ignore[no-untyped-def]
    """Returns a // b of numbers that are not negative, for quotients up to 2^20.

    Integers are divided in some thirty instructions, which took longer than the products of a tile.
    """
    found = ((a.to(tl.float32) + 0.5) * (1.0 / b)).to(tl.int32)
    rest = a - found * b
    return tl.where(rest < 0, found - 1, tl.where(rest >= b, found + 1, found))


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    q,
    tap,
    P,
    OH,
    OW,
    H,
    W,
    x_r,
    x_h,
    x_w,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
):
    """Returns the offset of a tap of the window at position q, and whether it is inside the input."""
    line = _quotient(q, OW)  # of all rows of the sample
    row = _quotient(line, OH)
    h = (line - row * OH) * SH + tap // KW * DH - PH
    w = (q - line * OW) * SW + tap % KW * DW - PW
    is_inside = (q < P) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    return tl.where(is_inside, row * x_r + h * x_h + w * x_w, 0), is_inside


@triton.jit
def _squares_of_tile(  # type: ignore[no-untyped-def]
    tile,
    group,
    n,
    g,
    x,
    P,
    O,
    C,
    OH,
    OW,
    H,
    W,
    g_n,
    g_p,
    x_n,
    x_r,
    x_h,
    x_w,
    TILES_J,
    TAPS: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr,
    POSITIONS: tl.constexpr,
    IS_ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Sums the squares of one tile of one sample's gradient."""
    n = tl.cast(n, tl.int64)
    o = (tile // TILES_J) * BLOCK_O + tl.arange(0, BLOCK_O)
    first = (tile % TILES_J) * BLOCK_J
    if IS_ONE_TAP:
        tap = first // C
        c = first % C + tl.arange(0, BLOCK_J)
    else:
        tap = ((first + tl.arange(0, BLOCK_J)) // C)[None, :]
        c = (first + tl.arange(0, BLOCK_J)) % C
    is_column = (first + tl.arange(0, BLOCK_J) < C * TAPS)[None, :]
    g_at = g + n * g_n + (group * O + o)[None, :]
    x_at = x + n * x_n + (group * C + c)[None, :]
    found = tl.zeros((BLOCK_O, BLOCK_J), dtype=tl.float32)
    for start in range(0, P, POSITIONS):
        q = (start + tl.arange(0, POSITIONS))[:, None]
        at, is_inside = _seen(q, tap, P, OH, OW, H, W, x_r, x_h, x_w, KW, SH, SW, PH, PW, DH, DW)
        a = tl.load(g_at + q * g_p, mask=(q < P) & (o < O)[None, :], other=0.0)
        b = tl.load(x_at + at, mask=is_inside & is_column, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        found = tl.dot(tl.trans(a), b, found, input_precision=PRECISION)
    return tl.sum(tl.sum(found * found, axis=1), axis=0)


@Kernel
@triton.jit
def _tile_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    parts,
    P,
    O,
    C,
    OH,
    OW,
    H,
    W,
    g_n,
    g_p,
    x_n,
    x_r,
    x_h,
    x_w,
    GROUPS,
    TILES_O,
    TILES_J,
    TAPS: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr,
    POSITIONS: tl.constexpr,
    IS_ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    tile = program % (TILES_O * TILES_J)
    group = program // (TILES_O * TILES_J) % GROUPS
    n = program // (TILES_O * TILES_J * GROUPS)
    # fmt: off
    squares = _squares_of_tile(
        tile, group, n, g, x, P, O, C, OH, OW, H, W, g_n, g_p, x_n, x_r, x_h, x_w, TILES_J,
        TAPS, KW, SH, SW, PH, PW, DH, DW, BLOCK_O, BLOCK_J, POSITIONS, IS_ONE_TAP, PRECISION, WIDEN,
    )
    # fmt: on
    tl.store(parts + program, squares)


@Kernel
@triton.jit
def _mend_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    parts,
    found,
    P,
    O,
    C,
    OH,
    OW,
    H,
    W,
    g_n,
    g_p,
    x_n,
    x_r,
    x_h,
    x_w,
    GROUPS,
    TILES_O,
    TILES_J,
    N,
    PARTS,
    LEAST: tl.constexpr,
    TAPS: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_J: tl.constexpr,
    POSITIONS: tl.constexpr,
    IS_ONE_TAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        sum_of_pairs = sum_of_parts(parts + n * PARTS, PARTS)
        is_good = sum_of_pairs >= LEAST * sum_of_parts(parts + (N + n) * PARTS, PARTS)
        tiles = tl.where(is_good, 0, GROUPS * TILES_O * TILES_J)
        total = tl.zeros((1,), dtype=tl.float64)
        for place in range(0, tiles):
            tile = place % (TILES_O * TILES_J)
            group = place // (TILES_O * TILES_J)
            # fmt: off
            total += _squares_of_tile(
                tile, group, n, g, x, P, O, C, OH, OW, H, W, g_n, g_p, x_n, x_r, x_h, x_w, TILES_J,
                TAPS, KW, SH, SW, PH, PW, DH, DW, BLOCK_O, BLOCK_J, POSITIONS, IS_ONE_TAP, PRECISION, WIDEN,
            )
            # fmt: on
        tl.store(found + n + tl.arange(0, 1), tl.where(is_good, sum_of_pairs, total))


@Kernel
@triton.jit
def _gram_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    parts,
    P,
    O,
    C,
    OH,
    OW,
    H,
    W,
    g_n,
    g_p,
    x_n,
    x_r,
    x_h,
    x_w,
    GROUPS,
    PAIRS,
    TAPS: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    i, j = pair_of(program % PAIRS)
    group = program // PAIRS % GROUPS
    n = (program // (PAIRS * GROUPS)).to(tl.int64)
    a = i * BLOCK + tl.arange(0, BLOCK)
    b = j * BLOCK + tl.arange(0, BLOCK)
    of_g = inner_products(
        g + n * g_n + group * O,
        tl.minimum(a, P - 1),
        tl.minimum(b, P - 1),
        g_p,
        O,
        BLOCK,
        COLUMNS,
        PRECISION,
        WIDEN,
    )
    x_at = x + n * x_n + group * C
    of_x = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    chunks = tl.cdiv(C, COLUMNS)
    for step in range(0, TAPS * chunks):
        tap = step // chunks
        c = (step % chunks) * COLUMNS + tl.arange(0, COLUMNS)
        a_at, a_inside = _seen(
            a[:, None], tap, P, OH, OW, H, W, x_r, x_h, x_w, KW, SH, SW, PH, PW, DH, DW
        )
        b_at, b_inside = _seen(
            b[:, None], tap, P, OH, OW, H, W, x_r, x_h, x_w, KW, SH, SW, PH, PW, DH, DW
        )
        u = tl.load(x_at + a_at + c[None, :], mask=a_inside & (c < C)[None, :], other=0.0)
        v = tl.load(x_at + b_at + c[None, :], mask=b_inside & (c < C)[None, :], other=0.0)
        if WIDEN:
            u = u.to(tl.float32)
            v = v.to(tl.float32)
        of_x = tl.dot(u, tl.trans(v), of_x, input_precision=PRECISION)
    products = tl.where((a < P)[:, None] & (b < P)[None, :], of_x * of_g, 0.0)
    total = tl.sum(tl.sum(products, axis=1), axis=0)
    squares = tl.where(a[:, None] == b[None, :], products, 0.0)
    tl.store(parts + program, tl.where(i == j, total, 2.0 * total))
    tl.store(parts + tl.num_programs(0) + program, tl.sum(tl.sum(squares, axis=1), axis=0))


def _like_samples(g: Tensor, *_: Any) -> Tensor:
    return g.new_empty(len(g), dtype=torch.float64)


@operation("convolution_by_tiles", _like_samples)
def convolution_by_tiles(
    g: Tensor,
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes |G_n|² from g (n, r, o, h', w') and x (n, r, c, h, w); `padding` is the leading one."""
    if _has_one_tap(taps, padding, groups):
        return tile_squared_norms(*_by_position(g, x, stride))
    samples = len(g)
    g, x, sizes = channels_last(g, x, groups)
    (tiles_o, tiles_j), settings = _tiling(sizes, taps, g.dtype)
    parts = torch.empty(samples, groups * tiles_o * tiles_j, device=g.device, dtype=torch.float64)
    geometry = geometry_of(taps, stride, padding, dilation)
    _tile_kernel(
        parts.numel(), g, x, parts, *sizes, groups, tiles_o, tiles_j, **geometry, **settings
    )
    return parts.sum(1)


def _tiling(
    sizes: tuple[int, ...], taps: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Returns the number of tiles of a gradient, and the settings of the kernel."""
    positions, outputs, channels, *_ = sizes
    columns = channels * taps[0] * taps[1]
    is_half = dtype != torch.float32
    block_o = power_of_two(outputs, 16, 128 if is_half else 64)
    block_j = power_of_two(columns, 16, 128 if is_half and channels % 128 == 0 else 64)
    settings = {
        "BLOCK_O": block_o,
        "BLOCK_J": block_j,
        "POSITIONS": power_of_two(positions, 16, 64 if is_half else 32),
        "IS_ONE_TAP": channels % block_j == 0,
        "PRECISION": float32_precision(),
        "WIDEN": INTERPRETED,
        "num_warps": 8 if block_o * block_j >= 128 * 128 else 4,
        "num_stages": 3,
    }
    return (-(-outputs // block_o), -(-columns // block_j)), settings


@operation("convolution_by_gram", _like_samples)
def convolution_by_gram(
    g: Tensor,
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes |G_n|² as `convolution_by_tiles` does, from pairs of positions."""
    if _has_one_tap(taps, padding, groups):
        g, x = _by_position(g, x, stride)
        found: Tensor = gram_squared_norms([g], [x])[0]
        return found
    samples = len(g)
    g, x, sizes = channels_last(g, x, groups)
    channels = sizes[2]
    is_half = g.dtype != torch.float32
    block = power_of_two(sizes[0], 16, 64)
    pairs = pair_count(sizes[0], block)
    geometry = geometry_of(taps, stride, padding, dilation)
    # For each block, its sum and the sum of its diagonal.
    parts = torch.empty(2, samples, groups * pairs, device=g.device, dtype=torch.float64)
    _gram_kernel(
        parts[0].numel(),
        g,
        x,
        parts,
        *sizes,
        groups,
        pairs,
        **geometry,
        BLOCK=block,
        COLUMNS=power_of_two(channels, 16, 64 if is_half else 32),
        PRECISION=float32_precision(),
        WIDEN=INTERPRETED,
        num_warps=4,
        num_stages=3,
    )
    found = parts.new_empty(samples)
    tiles, settings = _tiling(sizes, taps, g.dtype)
    _mend_kernel(
        min(samples, MULTIPROCESSORS),
        g,
        x,
        parts,
        found,
        *sizes,
        groups,
        *tiles,
        samples,
        groups * pairs,
        LEAST=least_trusted(torch.float32),
        **geometry,
        **settings,
    )
    return found


def convolution_gram_is_cheaper(positions: int, outputs: int, columns: int) -> bool:
    """Whether pairs of positions cost less than the (outputs, columns) gradient."""
    sizes = positions, outputs, columns
    return convolution_gram_microseconds(*sizes) < convolution_tile_microseconds(*sizes)


def one_tap_microseconds(
    samples: int, positions: int, outputs: int, channels: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Estimates the times of tiles and of pairs of positions for a convolution of one tap on an H200."""
    sizes = samples, positions, outputs, channels, dtype
    return tile_microseconds(*sizes), gram_microseconds(*sizes, is_alone=True)


def convolution_gram_microseconds(positions: int, outputs: int, columns: int) -> float:
    """Estimates the time of pairs of positions of one sample and group on an H200."""
    block = power_of_two(positions, 16, 64)
    multiplications = pair_count(positions, block) * block**2 * (outputs + columns)
    return multiplications / _PAIR_RATES[block]


def convolution_tile_microseconds(positions: int, outputs: int, columns: int) -> float:
    """Estimates the time of the tiles of one gradient on an H200."""
    return positions * max(outputs, 16) * max(columns, 16) / _TILE_RATE


# Multiplications per microsecond of the whole GPU: of pairs, by block size, and of tiles.
_PAIR_RATES = {16: 1.7e7, 32: 6.0e7, 64: 1.26e8}
_TILE_RATE = 5.8e7


def _has_one_tap(taps: Sequence[int], padding: Sequence[int], groups: int) -> bool:
    """Whether every output reads a single position of all channels."""
    return [*taps] == [1, 1] and not any(padding) and groups == 1


def _by_position(g: Tensor, x: Tensor, stride: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns g and those positions of x that are read, (n, t, channels); a view of channels last."""
    (oh, ow), (down, right) = g.shape[3:], stride
    x = x[..., : (oh - 1) * down + 1 : down, : (ow - 1) * right + 1 : right]
    g, x = (t.movedim(2, -1).flatten(1, 3).contiguous() for t in same_dtype(g, x))
    return g, x


def channels_last(g: Tensor, x: Tensor, groups: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Returns g and x, (n·r, ...), channels last, and the sizes and strides that the kernels take."""
    _, rows, o, oh, ow = g.shape
    c, h, w = x.shape[2:]
    g, x = (t.flatten(0, 1).contiguous(memory_format=torch.channels_last) for t in same_dtype(g, x))
    p = rows * oh * ow
    in_order = (p, o // groups, c // groups, oh, ow, h, w)
    strides = (p * o, o, rows * h * w * c, h * w * c, w * c, c)
    return g, x, (*in_order, *strides)


def geometry_of(
    taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> dict[str, int]:
    return {
        "TAPS": taps[0] * taps[1],
        "KW": taps[1],
        "SH": stride[0],
        "SW": stride[1],
        "PH": padding[0],
        "PW": padding[1],
        "DH": dilation[0],
        "DW": dilation[1],
    }
