"""G_n[o, k] = Σ_p g[n,o,p] x[n, c, stride·p + dilation·k - padding], where each output has one channel c.

A program computes one row of taps of some outputs of one sample. It keeps its sums in registers while it
passes over the positions. An input is read once for each tap that sees it: from a cache after the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pergrad.kernels.convolution import channels_last, geometry_of
from pergrad.kernels.launching import Kernel, power_of_two
from pergrad.runtime import operation

__all__ = ["depthwise_gradients"]


@Kernel
@triton.jit
def _depthwise_kernel(  # type: ignore[no-untyped-def]
    g,
    x,
    found,
    ROWS,  # of the output, over all rows of a sample
    O,
    C,
    OH,
    OW,
    H,
    W,
    BLOCKS,
    TAPS: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    EACH: tl.constexpr,  # outputs of a channel
    WIDTH: tl.constexpr,  # KW, rounded up
    POSITIONS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,  # pieces that are loaded ahead
):
    program = tl.program_id(0)
    i = program % (TAPS // KW)
    block = program // (TAPS // KW) % BLOCKS
    n = (program // (TAPS // KW) // BLOCKS).to(tl.int64)
    o = block * OUTPUTS + tl.arange(0, OUTPUTS)
    c = o // EACH
    j = tl.arange(0, WIDTH)
    total = tl.zeros((POSITIONS, WIDTH, OUTPUTS), dtype=tl.float32)
    g += n * ROWS * OW * O
    x += n * (ROWS // OH) * H * W * C
    pieces = tl.cdiv(OW, POSITIONS)  # of a row of the output
    for piece in tl.range(0, ROWS * pieces, num_stages=STAGES):
        row = piece // pieces
        w = piece % pieces * POSITIONS + tl.arange(0, POSITIONS)
        y = row % OH * SH + i * DH - PH
        z = w[:, None] * SW + j[None, :] * DW - PW
        is_inside = (y >= 0) & (y < H)
        is_output = (w < OW)[:, None] & (o < O)[None, :] & is_inside
        is_seen = (z >= 0) & (z < W) & (j < KW)[None, :] & is_inside
        g_at = g + row.to(tl.int64) * OW * O
        x_at = x + (row // OH * H + y).to(tl.int64) * W * C
        a = tl.load(g_at + w[:, None] * O + o[None, :], mask=is_output, other=0.0)
        b = tl.load(
            x_at + z[:, :, None] * C + c[None, None, :],
            mask=is_seen[:, :, None] & (o < O)[None, None, :],
            other=0.0,
        )
        total += a.to(tl.float32)[:, None, :] * b.to(tl.float32)
    at = ((n * O + o[None, :]) * (TAPS // KW) + i) * KW + j[:, None]
    tl.store(found + at, tl.sum(total, axis=0), mask=(j < KW)[:, None] & (o < O)[None, :])


def _like_gradients(g: Tensor, x: Tensor, taps: Sequence[int], *_: object) -> Tensor:
    return g.new_empty(g.shape[0], g.shape[2], 1, *taps, dtype=torch.float32)


@operation("depthwise_gradients", _like_gradients)
def depthwise_gradients(
    g: Tensor,
    x: Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes G_n, (n, o, 1, *taps) in float32, from g (n, r, o, h', w') and x (n, r, c, h, w)."""
    found = _like_gradients(g, x, taps)
    _, rows, outputs, oh, ow = g.shape
    channels, h, w = x.shape[2:]
    g, x, _ = channels_last(g, x, groups)
    width, block = power_of_two(taps[1], 1, 2**10), power_of_two(outputs, 8, 32)
    blocks = -(-outputs // block)
    _depthwise_kernel(
        len(found) * taps[0] * blocks,
        g,
        x,
        found,
        rows * oh,
        outputs,
        channels,
        oh,
        ow,
        h,
        w,
        blocks,
        **geometry_of(taps, stride, padding, dilation),
        EACH=outputs // channels,
        WIDTH=width,
        POSITIONS=power_of_two(ow, 1, max(1, _MOST // (width * block))),
        OUTPUTS=block,
        STAGES=3,
    )
    return found


_MOST = 2**12  # sums of a program: 32 registers of each thread
