"""Chooses, for each device and mode, the algorithm of every reduction by its cost.

A reduction has a dict of its ways, from name to function (`*_WAYS`); all of them take the same arguments.
The tables at the end of this module say which ways run where; `Chooser.pick` takes the cheapest. Read them
from top to bottom: torch's own functions everywhere, overrides of a CPU and a GPU, and Triton's kernels,
eagerly, in a trace and in a compiled step. All costs of one choice in one table have one unit, which its
comment states.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from pergrad.kernels import all_launchers, have_kernels
from pergrad.runtime import MACHINES, NEVER, Chooser, Machine, Table, machine_of

__all__ = ["chooser_for", "chooser_of", "fourier_is_cheaper", "gram_of_rows_is_cheaper"]

Shape = tuple[int, ...]
Dtype = torch.dtype

_CPU = MACHINES["cpu", "eager"]
_WITH_KERNELS = frozenset({"cuda"})  # devices on which `have_kernels` may be true


def chooser_of(*tensors: Tensor, by_kernels: bool = True) -> Chooser:
    """Returns the chooser of the machine that reductions of these tensors run on.

    Args:
        tensors: the tensors that a kernel would read, all on one device.
        by_kernels: whether to consider kernels, if they run on these tensors.
    """
    first = tensors[0]
    # The most frequent case by far is bound by Python, and spared a call.
    machine = _CPU if type(first) is Tensor and first.is_cpu else machine_of(first)
    if by_kernels and machine.device in _WITH_KERNELS and have_kernels(tensors):
        return _BY_KERNELS_OR_TORCH[machine]
    return _BY_TORCH[machine]


def chooser_for(machine: Machine, has_kernels: bool) -> Chooser:
    """Returns the chooser of a machine, with or without kernels."""
    return (_BY_KERNELS_OR_TORCH if has_kernels else _BY_TORCH)[machine]


def _chooser(machine: Machine, *, has_kernels: bool) -> Chooser:
    """Builds a chooser: the tables of device, mode and kernels override the general one."""
    is_eager = machine.mode == "eager"
    tables = [_EVERYWHERE]
    if not is_eager:
        tables.append(_WITHOUT_VALUES)
    if machine.device == "cpu":
        tables += [_ON_CPU, _ON_CPU_EAGERLY if is_eager else _ON_CPU_WITHOUT_VALUES]
    elif machine.device == "cuda":
        tables.append(_ON_GPU)
    if machine.mode == "compiled":
        tables.append(_COMPILED)
    if has_kernels:
        tables += [_BY_KERNELS, _BY_KERNELS_EAGERLY if is_eager else _BY_KERNELS_WITHOUT_VALUES]
        if machine.mode != "compiled":
            tables.append(_BY_KERNELS_UNLESS_COMPILED)
        if machine.device == "cuda":
            tables.append(_BY_KERNELS_ON_GPU)
    return Chooser(*tables)


# -- squared norms of an outer product: g (n, t, o), x (n, t, i)
# Units: multiplications per sample and position by torch; microseconds of an H200 by kernels.


def _gradients(g: Shape, x: Shape, *_: object) -> float:
    """Counts the entries of the (o, i) gradient."""
    return float(g[2] * x[2])


def _inner_products(g: Shape, x: Shape, *_: object) -> float:
    """Counts multiplications of two (t, t) matrices.

    NEVER if the problem is so small that the overhead of calls outweighs the arithmetic.
    """
    (n, t, o), i = g, x[2]
    return NEVER if n * t * o * i < _LITTLE else float(t * (o + i))


_LITTLE = 10**6  # multiplications that take as long as ten calls of torch


def _small_gradients(g: Shape, x: Shape, *dtypes: Dtype) -> float:
    """Counts as `_gradients`, a little less for fewer calls; NEVER if the problem is large or to be cast."""
    (n, t, o), i = g, x[2]
    is_wide = {*dtypes} in ({torch.float32}, {torch.float64})
    return 0.9 * o * i if is_wide and n * t * o * i < _LITTLE else NEVER


def _tile_kernel(g: Shape, x: Shape, g_dtype: Dtype, x_dtype: Dtype) -> float:
    if g_dtype == torch.float32 or g_dtype != x_dtype:  # cuBLAS is faster in float32
        return NEVER
    found: float = all_launchers().tile_microseconds(*g, x[2], g_dtype)
    return found


def _gradients_by_torch(g: Shape, x: Shape, g_dtype: Dtype, *_: object) -> float:
    """Estimates the time to multiply, write and read the gradients; in halves, by waves of whole blocks."""
    (n, t, o), i = g, x[2]
    moved = n * o * i * 2 * 4 / 4e6
    if g_dtype.itemsize != 2:
        return n * t * o * i / _FLOAT32_RATE + moved
    waves = ceil(n * ceil(o / 128) * ceil(i / 128) / 132)  # of 128 by 128 entries on each processor
    return waves * 132 * 128**2 * t / _HALF_RATE + moved + _MORE_LAUNCHES


def _products_by_torch(g: Shape, x: Shape, g_dtype: Dtype, *_: object) -> float:
    """Estimates the time to multiply, write and read two matrices of inner products."""
    (n, t, o), i = g, x[2]
    multiplications = n * t * t * (o + i) / (_HALF_RATE if g_dtype.itemsize == 2 else _FLOAT32_RATE)
    return multiplications + n * t * t * 6 * 4 / 4e6 + _MORE_LAUNCHES


# Multiplications per microsecond of cuBLAS on an H200. In halves, inner products of the heads of GPT-2 and of
# a Llama of 1B take what this says, and the gradients of Qwen2's head, once they are written and read.
_HALF_RATE, _FLOAT32_RATE = 4.0e8, 2.0e7
_MORE_LAUNCHES = 20.0  # microseconds: products, their reductions and the check


# -- squared norms of a table, (n, rows, i), that t of its rows were taken from
# Units: elements written per sample by torch; microseconds of an H200 by kernels (estimated).


def _all_rows(table: Shape, t: int) -> float:
    """Counts the entries of the table; NEVER if most are unused and too many to be worth no sorting."""
    n, rows, i = table
    return NEVER if rows > t and n * rows * i > _FEW else float(rows * i)


def _sorted_rows(table: Shape, t: int) -> float:
    """Counts the entries of the rows, and what sorting them takes."""
    n, _, i = table
    return float(t * i) + _FEW / max(n, 1)


_FEW = 10**5  # elements that are written in the time of ten calls of torch


def _table_kernel(table: Shape, t: int) -> float:
    """Estimates sorting and reading; one program adds all positions of a row, one after the other."""
    n, rows, i = table
    return 2 * _MORE_LAUNCHES + n * t * i * 4 / 4e6 + _STEP * t / max(rows, 1)


def _table_by_product(table: Shape, t: int) -> float:
    """Estimates a product with few rows, and writing and reading their sums."""
    n, rows, i = table
    written = n * rows * i * 2 * 4 / 4e6
    return 2 * _MORE_LAUNCHES + n * t * i * (4 / 4e6 + rows / _FLOAT32_RATE) + written


_STEP = 0.7  # microseconds of a load whose address is loaded first


# -- squared norms of an outer product in a shared launch, or in its own: microseconds


def _shared_gram_kernel(
    g: Shape, x: Shape, g_dtype: Dtype, x_dtype: Dtype, bound: int, precision: str | None
) -> float:
    """Estimates the kernel of inner products; `precision` only makes cached picks differ by it."""
    (n, t, o), i = g, x[2]
    if t == 1 or g_dtype != x_dtype:
        return NEVER
    is_alone = n * t * (o + i) * g_dtype.itemsize > bound
    found: float = all_launchers().gram_microseconds(n, t, o, i, g_dtype, is_alone=is_alone)
    return found


def _best_alone(g: Shape, x: Shape, g_dtype: Dtype, *_: object) -> float:
    """Estimates the cheapest of tiles, gradients and cuBLAS's matrices of inner products."""
    ways = _tile_kernel, _gradients_by_torch, _products_by_torch
    return min(way(g, x, g_dtype, g_dtype) for way in ways)


# -- squared norms of a convolution's kernel, (outputs, columns) in each of its groups
# Units: multiplications per sample and position by torch; microseconds of an H200 by kernels, for each sample
# and group, or for all samples (`one_tap`: their number and dtype) if a kernel has one tap.


def _kernel_gradients(positions: int, outputs: int, columns: int, *_: object) -> float:
    return float(outputs * columns)


def _pairs_of_windows(positions: int, outputs: int, columns: int, *_: object) -> float:
    return float(positions * (outputs + columns))


def _kernel_by_windows(
    positions: int,
    outputs: int,
    columns: int,
    dims: int,
    is_depthwise: bool = False,
    channels: int = 8,
    one_tap: tuple[int, Dtype] | None = None,
) -> float:
    """Estimates the time to copy windows of few channels, multiply them, and write and read the gradient.

    Less than all others for a depthwise kernel: matrix products of one output and a few taps are mostly
    padding.
    """
    if is_depthwise:
        return -1.0
    if dims > 2 or one_tap is not None or not _is_narrow(channels):
        return NEVER
    moved = positions * columns * 2 * 2 + outputs * columns * 2 * 4
    return moved / 4e6 + positions * outputs * columns / 1e8


def _by_kernel_of_convolutions(number: int, estimate: str) -> Callable[..., float]:
    """Builds the cost of a kernel from the launchers' function `estimate`.

    For a convolution of one tap, it is entry `number` of the estimates of outer products instead.
    """

    def cost(
        positions: int,
        outputs: int,
        columns: int,
        dims: int,
        is_depthwise: bool = False,
        channels: int = 8,
        one_tap: tuple[int, Dtype] | None = None,
    ) -> float:
        if dims > 2:
            return NEVER
        if one_tap is not None:
            return _microseconds_of_one_tap(positions, outputs, columns, one_tap)[number]
        found: float = getattr(all_launchers(), estimate)(positions, outputs, columns)
        return found * (_NARROW if _is_narrow(channels) else 1.0)

    return cost


_kernel_by_tiles = _by_kernel_of_convolutions(0, "convolution_tile_microseconds")
_kernel_by_pairs = _by_kernel_of_convolutions(1, "convolution_gram_microseconds")


def _kernel_by_torch(positions: int, outputs: int, columns: int, dims: int, *_: object) -> float:
    """Never chosen, except for three dimensions, which no kernel supports."""
    return NEVER if dims <= 2 else 0.0


def _microseconds_of_one_tap(
    positions: int, outputs: int, columns: int, one_tap: tuple[int, Dtype]
) -> tuple[float, float]:
    """Estimates tiles and pairs of positions."""
    samples, dtype = one_tap
    found: tuple[float, float] = all_launchers().one_tap_microseconds(
        samples, positions, outputs, columns, dtype
    )
    return found


def _is_narrow(channels: int) -> bool:
    """Whether kernels cannot load the channels of a window in wide pieces, as the three of an image."""
    return channels % 8 != 0


_NARROW = 8.0  # times as long as a kernel takes then: tiles of ResNet-50's first convolution take about 1 ms


# -- <G_n, G_m> of an outer product: multiplications per sample


def _pairs_of_positions(g: Shape, x: Shape) -> float:
    (n, t, o), i = g, x[2]
    return float(n * t * t * (o + i))


def _rows_of_gradients(g: Shape, x: Shape) -> float:
    (n, t, o), i = g, x[2]
    return float((t + n) * o * i)


# -- sketches of an outer product: operations per sample


def fourier_is_cheaper(t: int, o: int, i: int, size: int) -> bool:
    """Whether transforms of t positions cost less than the (o, i) gradient itself."""
    return _transforms(t, o, i, size) < _entries(t, o, i, size)


def gram_of_rows_is_cheaper(t: int, i: int, o: int) -> bool:
    """Whether inner products of t positions with each other cost less than t outer products."""
    return t * (i + o) < i * o


def _transforms(t: int, o: int, i: int, size: int) -> float:
    return float(t * size * 3 * size.bit_length())


def _entries(t: int, o: int, i: int, size: int) -> float:
    return float(t * o * i)


# -- weighted sums of several outer products in one launch, or one by one: launches


def _is_of_halves(t: int, g_dtype: Dtype, x_dtype: Dtype) -> bool:
    return g_dtype == x_dtype and g_dtype.itemsize == 2 and t >= 32


def _together_if_small(t: int, size: int, g_dtype: Dtype, x_dtype: Dtype, bound: int) -> float:
    is_small = size * g_dtype.itemsize <= bound
    return 1.0 if is_small and _is_of_halves(t, g_dtype, x_dtype) else NEVER


def _together(t: int, size: int, g_dtype: Dtype, x_dtype: Dtype, bound: int) -> float:
    return 1.0 if _is_of_halves(t, g_dtype, x_dtype) else NEVER


def _one_by_one(*_: object) -> float:
    return 4.0


# -- the dtype in which a convolution's gradient is summed: relative time


def _halves(g_dtype: Dtype, x_dtype: Dtype) -> float:
    return 1.0 if g_dtype == x_dtype else NEVER


def _wide_type(g_dtype: Dtype, x_dtype: Dtype) -> float:
    return 8.0


# -- gradients or factors, kept until all norms are known: bytes, weighted by the time that they save


def _bytes_of_gradients(bytes_dense: int, bytes_of_factors: int, is_convolution: bool) -> float:
    return float(bytes_dense)


def _bytes_of_factors(bytes_dense: int, bytes_of_factors: int, is_convolution: bool) -> float:
    """Weighs bytes: norms and sums of a convolution's factors take a quarter of the time of its gradients."""
    return bytes_of_factors * (0.25 if is_convolution else 1.0)


def _bytes_on_cpu(bytes_dense: int, bytes_of_factors: int, is_convolution: bool) -> float:
    """Weighs bytes: computing gradients once beats computing norms and then the sum from factors.

    A clipped sum of the benchmark's transformer takes 1.19 plain steps instead of 1.29.
    """
    return bytes_of_factors * 1.7


_EVERYWHERE: Table = {
    "norms of one position": "rank one",
    "norms of small gradients": "one each",
    "norms of an outer product": {
        "gradients": _gradients,
        "inner products": _inner_products,
    },
    "launches of parameters": "one each",
    "launch of an outer product": "alone",
    "norms of a table": {"rows added up": _sorted_rows, "whole table": _all_rows},
    "norms of a convolution": {
        "gradients": _kernel_gradients,
        "inner products": _pairs_of_windows,
    },
    # Norms that cancelled stay as found: looking for them would synchronise with the device.
    "mending": "left as found",
    "mending of an outer product": "left as found",
    "inner products of samples": "multiplied and summed",
    "gram of an outer product": {"rows": _rows_of_gradients, "pairs": _pairs_of_positions},
    "check of a gram": "left as found",
    "scaled samples": "in torch",
    "dropped samples": "zeroed",
    "weighted rows": "one product",
    "sum of a convolution": "wide",
    "sums of small gradients": "one by one",
    "sums of outer products": "one by one",
    "sketch of an outer product": {"entries": _entries, "transforms": _transforms},
    "sketch of rows": "single entries",
    "sketch of columns": "single entries",
    "products of transforms": "complex",
    "buckets": "by column",
    "kept for later": {"gradients": _bytes_of_gradients, "factors": _bytes_of_factors},
}

# Traces and compiled steps have no values.
_WITHOUT_VALUES: Table = {"weighted rows": "scaled and summed"}

_ON_CPU: Table = {
    "inner products of samples": "batched product",  # three times as fast
    "kept for later": {"gradients": _bytes_of_gradients, "factors": _bytes_on_cpu},
    "buckets": "by row",  # twice as fast
    "sketch of columns": "runs",  # a third of the time of single entries
}
_ON_CPU_EAGERLY: Table = {
    "norms of small gradients": "together",
    "norms of an outer product": {
        "small gradients": _small_gradients,
        "gradients": _gradients,
        "inner products": _inner_products,
    },
    "mending": "computed again",
    "mending of an outer product": "computed again",
    "check of a gram": "computed again",
    "scaled samples": "in torch, dropped ones looked for",
    "dropped samples": "looked for",
}
_ON_CPU_WITHOUT_VALUES: Table = {
    "mending of an outer product": "in an operation",
    # A compiler fuses it into one pass, which takes twice the time of a product if the rows are large.
    "weighted rows": "scaled and summed unless large",
}

_ON_GPU: Table = {
    # Products in low precision are many times as fast, so their operands are rounded.
    "scaled samples": "in torch, rounded",
    # cuDNN sums in float32 whatever its inputs are, and rounds once.
    "sum of a convolution": {"halves": _halves, "wide": _wide_type},
    # Atomic additions to few buckets wait for each other.
    "sketch of rows": "gathered",
    "sketch of columns": "gathered",
}

# Runs are written in place, and a compiler would copy them; it has no complex numbers.
_COMPILED: Table = {
    "sketch of rows": "gathered",
    "sketch of columns": "gathered",
    "products of transforms": "real",
}

_BY_KERNELS: Table = {
    "norms of one position": "rank one kernel",
    "norms of small gradients": "one each",
    "norms of an outer product": {
        "tile kernel": _tile_kernel,
        "gradients": _gradients_by_torch,
        "inner products": _products_by_torch,
    },
    "launches of parameters": "shared",
    "launch of an outer product": {"shared": _shared_gram_kernel, "alone": _best_alone},
    "norms of a table": {"kernel": _table_kernel, "whole table": _table_by_product},
    "norms of a convolution": {
        "gradients": _kernel_by_windows,
        "tile kernel": _kernel_by_tiles,
        "pair kernel": _kernel_by_pairs,
        "torch": _kernel_by_torch,
    },
    "sums of small gradients": "together",
}
_BY_KERNELS_ON_GPU: Table = {"mending of an outer product": "kernel"}
_BY_KERNELS_EAGERLY: Table = {
    "sums of outer products": {"together": _together_if_small, "one by one": _one_by_one},
    "joint sums of outer products": "kernel",
}
_BY_KERNELS_WITHOUT_VALUES: Table = {
    "sums of outer products": {"together": _together, "one by one": _one_by_one},
    # Launches are cheap there: cuBLAS computes the products, and a kernel corrects sums that are not finite.
    "joint sums of outer products": "products, mended",
}
# A compiler fuses these into one kernel by itself.
_BY_KERNELS_UNLESS_COMPILED: Table = {
    "scaled samples": "kernel",
    "dropped samples": "kernel",
    "weighted rows": "kernel",
}

_BY_TORCH = {machine: _chooser(machine, has_kernels=False) for machine in MACHINES.values()}
_BY_KERNELS_OR_TORCH = {
    machine: _chooser(machine, has_kernels=True) for machine in MACHINES.values()
}
