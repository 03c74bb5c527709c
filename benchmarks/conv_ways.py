"""Times all exact ways to compute G[n,o,c,i,j] = sum_hw g[n,o,h,w] x[n,c,h+i,w+j] on the CPU, per shape.

Run as ``python -m benchmarks.conv_ways``. Every way accepts stride, padding, dilation and groups,
and is checked against a float64 loop over the samples before it is timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    """One square convolution of a batch; `groups` equal to `c` is depthwise."""

    n: int
    c: int
    o: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1
    dilation: int = 1

    @property
    def out_size(self) -> int:
        reach = self.dilation * (self.kernel - 1) + 1
        return (self.size + 2 * self.padding - reach) // self.stride + 1

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.o, self.c // self.groups, self.kernel, self.kernel)

    def label(self) -> str:
        text = f"({self.n}, {self.c}, {self.o}, {self.size}, {self.kernel}, {self.stride})"
        extra = [f"groups {self.groups}"] * (self.groups > 1)
        extra += [f"dilation {self.dilation}"] * (self.dilation > 1)
        return " ".join([text, *extra])


Way = Callable[[Tensor, Tensor, Shape], Tensor]  # (n, c, h, w), (n, o, h', w') -> (n, *weight)


def _backward(
    x: Tensor, g: Tensor, s: Shape, *, weight_shape: tuple[int, ...], groups: int
) -> Tensor:
    weight = x.new_empty(()).expand(weight_shape)  # only its shape is read
    mask = [False, True, False]
    out = aten.convolution_backward(
        g,
        x,
        weight,
        None,
        [s.stride] * 2,
        [s.padding] * 2,
        [s.dilation] * 2,
        False,
        [0, 0],
        groups,
        mask,
    )
    return out[1]


def plain(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    return _backward(x, g, s, weight_shape=s.weight_shape, groups=s.groups)


def loop(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    rows = zip(x.split(1), g.split(1), strict=True)
    return torch.stack([plain(a, b, s) for a, b in rows])


def unfold_bmm(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    columns = F.unfold(
        x, (s.kernel, s.kernel), dilation=s.dilation, padding=s.padding, stride=s.stride
    )
    return _bmm(g, columns, s)


def _bmm(g: Tensor, columns: Tensor, s: Shape) -> Tensor:
    """Multiplies g with columns of shape (n, c * k * k, l)."""
    batch, length = s.n * s.groups, s.out_size**2
    left = g.reshape(batch, s.o // s.groups, length)
    right = columns.reshape(batch, -1, length)
    return torch.bmm(left, right.transpose(1, 2)).view(s.n, *s.weight_shape)


def _windows(x: Tensor, s: Shape) -> Tensor:
    """Returns a view (n, c, h', w', k, k) of the padded input."""
    reach = s.dilation * (s.kernel - 1) + 1
    x = F.pad(x, [s.padding] * 4) if s.padding else x
    view = x.unfold(2, reach, s.stride).unfold(3, reach, s.stride)
    return view[..., :: s.dilation, :: s.dilation]


def views_einsum(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    windows = _windows(x, s).unflatten(1, (s.groups, -1))
    out = torch.einsum("ngohw,ngchwij->ngocij", g.unflatten(1, (s.groups, -1)), windows)
    return out.reshape(s.n, *s.weight_shape)


def views_bmm(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    return _bmm(g, _windows(x, s).permute(0, 1, 4, 5, 2, 3), s)


def tap_bmm_view(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """Leaves (k, k) outermost in memory: no copy, but a result that is not contiguous."""
    x = F.pad(x, [s.padding] * 4) if s.padding else x
    batch, length, k = s.n * s.groups, s.out_size**2, s.kernel
    left = g.reshape(batch, s.o // s.groups, length)
    out = x.new_empty(k, k, batch, s.o // s.groups, s.c // s.groups)
    span = s.stride * (s.out_size - 1) + 1
    for i in range(k):
        for j in range(k):
            top, side = i * s.dilation, j * s.dilation
            tap = x[:, :, top : top + span : s.stride, side : side + span : s.stride]
            right = tap.reshape(batch, s.c // s.groups, length).transpose(1, 2)
            torch.bmm(left, right, out=out[i, j])
    return out.view(k, k, s.n, s.o, s.c // s.groups).permute(2, 3, 4, 0, 1)


def tap_bmm(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    return tap_bmm_view(x, g, s).contiguous()


def grouped(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    shape = (s.n * s.o, *s.weight_shape[1:])
    out = _backward(
        x.flatten(0, 1)[None], g.flatten(0, 1)[None], s, weight_shape=shape, groups=s.n * s.groups
    )
    return out.view(s.n, *s.weight_shape)


def vmap(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    weight = x.new_empty(s.weight_shape)

    def one(a: Tensor, b: Tensor) -> Tensor:
        return aten.convolution_backward(
            b[None],
            a[None],
            weight,
            None,
            [s.stride] * 2,
            [s.padding] * 2,
            [s.dilation] * 2,
            False,
            [0, 0],
            s.groups,
            [False, True, False],
        )[1]

    return torch.vmap(one)(x, g)


def forward_conv(x: Tensor, g: Tensor, s: Shape) -> Tensor:
    """Computes the weight gradient as a forward convolution: channels as batch, grad_output as kernel."""
    per = s.c // s.groups
    images = x.view(s.n, s.groups, per, s.size, s.size).permute(2, 0, 1, 3, 4).flatten(1, 2)
    kernels = g.reshape(s.n * s.o, 1, s.out_size, s.out_size)
    out = F.conv2d(
        images,
        kernels,
        stride=s.dilation,
        padding=s.padding,
        dilation=s.stride,
        groups=s.n * s.groups,
    )[..., : s.kernel, : s.kernel]
    return out.permute(1, 0, 2, 3).reshape(s.n, *s.weight_shape)


WAYS: dict[str, Way] = {
    "F.unfold+bmm": unfold_bmm,
    "views+einsum": views_einsum,
    "views+bmm": views_bmm,
    "tap bmm": tap_bmm,
    "tap bmm (view)": tap_bmm_view,
    "grouped": grouped,
    "vmap": vmap,
    "fwd conv": forward_conv,
    "loop": loop,
}

# (n, c, o, size, kernel, stride, padding): the layers of the CPU ResNet-18-GN, then others
RESNET = [
    Shape(8, 3, 64, 32, 3, 1, 1),
    Shape(8, 64, 64, 32, 3, 1, 1),
    Shape(8, 64, 128, 32, 3, 2, 1),
    Shape(8, 64, 128, 32, 1, 2),
    Shape(8, 128, 128, 16, 3, 1, 1),
    Shape(8, 128, 256, 16, 3, 2, 1),
    Shape(8, 128, 256, 16, 1, 2),
    Shape(8, 256, 256, 8, 3, 1, 1),
    Shape(8, 256, 512, 8, 3, 2, 1),
    Shape(8, 256, 512, 8, 1, 2),
    Shape(8, 512, 512, 4, 3, 1, 1),
]
OTHERS = [
    Shape(16, 3, 32, 32, 3, 1, 1),
    Shape(16, 32, 32, 32, 3, 1, 1),
    Shape(16, 64, 64, 16, 3, 1, 1),
    Shape(16, 128, 128, 8, 3, 1, 1),
    Shape(16, 256, 256, 4, 3, 1, 1),
    Shape(64, 1, 16, 8, 3, 1, 1),
    Shape(64, 16, 32, 8, 3, 1, 1),
    Shape(8, 3, 64, 112, 7, 2, 3),
    Shape(8, 3, 192, 64, 8, 8),
    Shape(8, 64, 256, 28, 1, 1),
    Shape(8, 256, 64, 28, 1, 1),
    Shape(8, 256, 1024, 14, 1, 1),
    Shape(8, 128, 128, 28, 3, 1, 1, groups=128),
    Shape(8, 256, 256, 14, 7, 1, 3, groups=256),
    Shape(8, 128, 128, 28, 3, 1, 1, groups=32),
    Shape(8, 64, 64, 28, 3, 1, 2, dilation=2),
]


def measure(shape: Shape, *, seconds: float, seed: int) -> dict[str, float | None]:
    """Returns median milliseconds per way, None for a wrong one; interleaves the ways in random order."""
    torch.manual_seed(seed)
    x = torch.randn(shape.n, shape.c, shape.size, shape.size)
    g = torch.randn(shape.n, shape.o, shape.out_size, shape.out_size)
    expected = loop(x.double(), g.double(), shape)
    ways: dict[str, Way] = {"plain": plain, **WAYS}
    times: dict[str, list[float]] = {name: [] for name in ways}
    scale = expected.abs().max()
    for name, way in WAYS.items():
        got = way(x, g, shape)
        if got.shape != expected.shape or (got - expected).abs().max() > 1e-5 * scale:
            del times[name]
    order = random.Random(seed)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        names = list(times)
        order.shuffle(names)
        for name in names:
            start = time.perf_counter()
            ways[name](x, g, shape)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times[name]) if name in times else None for name in ways}


def main(arguments: list[str] | None = None) -> int:
    """Prints a markdown row per shape, the fastest exact way in bold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per shape")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = list(WAYS)
    print(
        f"ms, float32, CPU, {torch.get_num_threads()} threads, torch {torch.__version__};", end=" "
    )
    print("shape = (N, C, O, size, kernel, stride)\n")
    print("| shape | plain | " + " | ".join(names) + " | winner |")
    print("|---" * (len(names) + 3) + "|")
    for shape in RESNET + OTHERS:
        row = measure(shape, seconds=options.seconds, seed=options.seed)
        exact = {name: row[name] for name in names if row[name] is not None}
        winner = min(exact, key=lambda name: exact[name] or 0.0)
        cells = ["WRONG" if row[name] is None else f"{row[name]:.2f}" for name in names]
        cells = [f"**{c}**" if n == winner else c for n, c in zip(names, cells, strict=True)]
        print(f"| {shape.label()} | {row['plain']:.2f} | " + " | ".join(cells) + f" | {winner} |")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
