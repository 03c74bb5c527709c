"""Times each Triton kernel against the equivalent torch functions, on the shapes of known models.

``python -m benchmarks.kernels`` prints, for each kernel and shape, the GPU time of the kernel and of torch in
microseconds, the estimate of the kernel's cost function, and the error against float64. ``--tiny`` runs small
shapes, also in the interpreter on a CPU (``TRITON_INTERPRET=1``), where times mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pergrad.factors import Convolution, OuterProduct, PositionSum, RowSum
from pergrad.kernels import launchers
from pergrad.reductions.norms import by_gram, by_tiles
from pergrad.runtime.bounds import default_bound

OUTER = {  # (n, t, o, i)
    "GPT-2, attention": (16, 512, 768, 768),
    "GPT-2, up": (16, 512, 3072, 768),
    "ViT-B/16, attention": (32, 196, 768, 768),
    "ViT-B/16, up": (32, 196, 3072, 768),
    "Llama, attention": (8, 2048, 4096, 4096),
}
IMAGES = {  # (n, channels, outputs, side, taps, stride)
    "ResNet-18, stem": (256, 3, 64, 32, 3, 1),
    "ResNet-18, first": (256, 64, 64, 32, 3, 1),
    "ResNet-18, second": (256, 128, 128, 16, 3, 1),
    "ResNet-18, third": (256, 256, 256, 8, 3, 1),
    "ResNet-18, fourth": (256, 512, 512, 4, 3, 1),
    "ResNet-18, shortcut": (256, 64, 128, 32, 1, 2),
}


@dataclass(frozen=True)
class Pair:
    """One kernel on one shape: its launcher, the torch equivalent, and its estimated cost."""

    name: str
    shape: str
    kernel: Callable[[], Tensor]
    torch: Callable[[], Tensor]
    exact: Callable[[], Tensor]
    microseconds: float | None = None


def outer_products(
    shape: str, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> Iterator[Pair]:
    n, t, o, i = sizes
    device = _device()
    g, x = (torch.randn(n, t, width, device=device, dtype=dtype) for width in (o, i))
    factor, bound = OuterProduct(g, x), default_bound(device)

    def exact() -> Tensor:
        each = [a.double().T @ b.double() for a, b in zip(g, x, strict=True)]
        return torch.stack([one.square().sum() for one in each])

    costs = launchers.gram_microseconds(*sizes, dtype), launchers.tile_microseconds(*sizes, dtype)
    yield Pair(
        "gram",
        shape,
        lambda: launchers.gram_squared_norms([g], [x])[0],
        lambda: by_gram(factor, bound),
        exact,
        costs[0],
    )
    yield Pair(
        "tile",
        shape,
        lambda: launchers.tile_squared_norms(g, x),
        lambda: by_tiles([factor], bound),
        exact,
        costs[1],
    )
    biases = PositionSum(g)
    yield Pair(
        "columns",
        shape,
        lambda: launchers.column_squared_norms([g], [], [], [])[0],
        lambda: by_tiles([biases], bound),
        lambda: g.double().sum(1).square().sum(1),
    )
    weights = torch.rand(n, device=device)
    yield Pair(
        "weighted sum",
        shape,
        lambda: launchers.weighted_outer_products([g], [x], weights)[0],
        lambda: (g * weights.view(-1, 1, 1).to(dtype)).flatten(0, 1).T @ x.flatten(0, 1),
        lambda: torch.stack(
            [
                w * (a.double().T @ b.double())
                for w, a, b in zip(weights.double(), g, x, strict=True)
            ]
        ).sum(0),
    )
    rows = torch.randn(n, o * i, device=device)  # kept gradients are float32
    yield Pair(
        "weighted rows",
        shape,
        lambda: launchers.weighted_rows(rows, weights),
        lambda: weights @ rows,
        lambda: torch.stack(
            [w * row.double() for w, row in zip(weights.double(), rows, strict=True)]
        ).sum(0),
    )


def tables(shape: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Iterator[Pair]:
    n, t, _, width = sizes
    rows, device = 50257, _device()
    index = torch.randint(rows, (n, t), device=device)
    g = torch.randn(n, t, width, device=device, dtype=dtype)

    def coalesced(dtype: torch.dtype) -> Tensor:
        found = RowSum(index, g, rows).coalesced(dtype).grad_output
        return found.flatten(1).square().sum(1)

    yield Pair(
        "table",
        shape,
        lambda: launchers.table_squared_norms(index, g),
        lambda: coalesced(torch.float32),
        lambda: coalesced(torch.float64),
    )


def convolutions(
    shape: str, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> Iterator[Pair]:
    n, channels, outputs, side, taps, stride = sizes
    device, padding = _device(), taps // 2
    out = (side + 2 * padding - taps) // stride + 1
    x = torch.randn(n, 1, channels, side, side, device=device, dtype=dtype)
    g = torch.randn(n, 1, outputs, out, out, device=device, dtype=dtype)
    factor = Convolution(
        g,
        x,
        (outputs, channels, taps, taps),
        (stride, stride),
        ((padding, padding), (padding, padding)),
        (1, 1),
        1,
    )

    def exact() -> Tensor:
        wide = factor.mapped(lambda t: t.double())
        parts = [wide.part(slice(k, k + 1)).materialize() for k in range(n)]
        return torch.cat([part.flatten(1).square().sum(1) for part in parts])

    for name in ("tiles", "gram"):
        launch = getattr(launchers, f"convolution_by_{name}")
        yield Pair(
            f"convolution, {name}",
            shape,
            partial(launch, *factor.in_two_dimensions()),
            lambda: by_tiles([factor], default_bound(device)),
            exact,
        )


def microseconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Returns the GPU time of one run in microseconds; on a CPU, the wall time."""
    run()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return sum(event.device_time for event in profile.events()) / repeats


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pairs(dtype: torch.dtype, *, is_tiny: bool) -> Iterator[Pair]:
    """Yields all kernels on all shapes."""
    for shape, sizes in ({"tiny": (2, 20, 24, 16)} if is_tiny else OUTER).items():
        yield from outer_products(shape, sizes, dtype)
        yield from tables(shape, sizes, dtype)
    for shape, images in ({"tiny": (2, 3, 4, 6, 3, 1)} if is_tiny else IMAGES).items():
        yield from convolutions(shape, images, dtype)


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each kernel and shape."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny with TRITON_INTERPRET=1 runs in the interpreter")
    torch.manual_seed(0)
    print(
        f"{'kernel':20} {'shape':20} {'kernel us':>10} {'torch us':>10} {'cost us':>10} {'error':>8}"
    )
    for pair in pairs(getattr(torch, options.dtype), is_tiny=options.tiny):
        found, exact = pair.kernel().double(), pair.exact()
        error = ((found - exact).norm() / exact.norm()).item()
        cost = "" if pair.microseconds is None else f"{pair.microseconds:.1f}"
        times = f"{microseconds(pair.kernel):10.1f} {microseconds(pair.torch):10.1f}"
        print(f"{pair.name:20} {pair.shape:20} {times} {cost:>10} {error:8.1e}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
