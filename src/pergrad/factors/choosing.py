"""Chooses, for each device and mode, the algorithms of factors and rules.

Read the tables at the end from top to bottom: the default of every machine, the overrides of a CPU and a GPU,
the overrides of traces and compiled steps, and those of compiled steps of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pergrad.runtime.choosing import NEVER, Chooser, Table
from pergrad.runtime.machine import MACHINES, Machine, machine_of

__all__ = ["CHOOSERS", "chooser_of", "transposed_is_cheaper"]


def chooser_of(t: Tensor) -> Chooser:
    """Returns the chooser of the machine that functions of the tensor run on."""
    return CHOOSERS[machine_of(t)]


# -- a gradient of shape (o, i), by one matrix product per sample


def transposed_is_cheaper(o: int, i: int) -> bool:
    """Whether a CPU computes the (i, o) gradient and transposes it faster than the (o, i) gradient.

    A CPU computes rows in vectors of 16; the 9 or 27 columns of a first convolution leave lanes empty.
    """
    return i % 16 != 0 and o % 16 == 0 and i < min(o, 64)


def _lanes(o: int, i: int) -> float:
    return 1.0


def _lanes_transposed(o: int, i: int) -> float:
    return 0.5 if transposed_is_cheaper(o, i) else NEVER


# -- the gradient of a convolution's kernel: `channels` and `taps` of one output, `positions` of one row;
# `has_kernel`: a Triton kernel takes it


def _by_windows(
    channels: int, taps: int, positions: int, groups: int, has_kernel: bool = False
) -> float:
    """Counts the positions whose windows are copied, at k·c reads each; the product runs at full speed."""
    return float(positions)


def _samples_as_groups(rate: int) -> Callable[..., float]:
    """Builds the cost of a grouped convolution, in positions whose windows could be copied meanwhile.

    It copies nothing, but is slow if the kernel is large compared with the number of positions. The rates are
    from `benchmarks/conv_ways.py`, on a CPU and on an H200.
    """

    def cost(
        channels: int, taps: int, positions: int, groups: int, has_kernel: bool = False
    ) -> float:
        if taps == 1:
            return NEVER
        if channels == 1:
            return -1.0 if groups > 1 else NEVER
        return float(rate * channels) if channels >= 16 else NEVER

    return cost


def _by_kernel(
    channels: int, taps: int, positions: int, groups: int, has_kernel: bool = False
) -> float:
    """Returns less than all others: torch's own gradient takes four times as long (H200)."""
    return -2.0 if has_kernel else NEVER


# -- the product of windows with the output gradient of a convolution


def _as_it_is(outputs: int, columns: int, is_half: bool) -> float:
    return 1.0


def _transposed(outputs: int, columns: int, is_half: bool) -> float:
    """Returns less where only the transposed gradient has aligned rows.

    Otherwise a GPU multiplies by scalar loads: the 147 columns of ResNet-50's first convolution took 0.57 ms.
    """
    return 0.5 if is_half and columns % 8 and not outputs % 8 else NEVER


# -- copies of windows, by the length of their contiguous pieces


def _pieces_of_channels(channels: int, width: int) -> float:
    return float(width)


def _pieces_of_rows(channels: int, width: int) -> float:
    return float(channels)


# -- group norm; `is_left`: reductions can normalise the input; `has_kernel`: torch has a kernel for the sums


def _left(is_left: bool, has_kernel: bool) -> float:
    return 0.0 if is_left else NEVER


def _two_sums(is_left: bool, has_kernel: bool) -> float:
    """Counts passes over the input: half as many as to write x̂, multiply it and sum twice."""
    return 2.0 if has_kernel else NEVER


def _written(is_left: bool, has_kernel: bool) -> float:
    return 4.0


# -- sums of t positions by the rows of a table, each of `width`: picoseconds for each entry of a position.
# `columns` entries share a row: those of all samples if these share the index.


def _added(t: int, rows: int, width: int, columns: int) -> float:
    """Returns the time of a CPU, which adds the entries of a position at once (one thread)."""
    return max(150.0, 12_000 / max(width, 1))


def _multiplied(rate: float, compared: float) -> Callable[..., float]:
    """Builds the cost of a product, by the time of a multiplication and of an entry of its matrix.

    The matrix tells the row of each position. It may be a few times as large as the gradient.
    """

    def cost(t: int, rows: int, width: int, columns: int) -> float:
        return rows * (rate + compared / max(columns, 1)) if rows <= 4 * columns else NEVER

    return cost


_MULTIPLIED_ON_GPU = _multiplied(0.12, 2)  # estimated from an H200's rates of float32


def _added_by_atomics(t: int, rows: int, width: int, columns: int) -> float:
    """Returns the time of torch's kernel, whose threads add to different columns (T5 on an H200)."""
    return 14.0


def _added_by_compiler(t: int, rows: int, width: int, columns: int) -> float:
    """Counts the threads of a warp that add to one row: 470 to 780 for T5's 32 rows (H200)."""
    return 5 + 20 * min(t / max(rows, 1), 32)


_EVERYWHERE: Table = {
    "gradient of an outer product": "as it is",
    "gradient of a kernel": {"samples as groups": _samples_as_groups(2), "windows": _by_windows},
    "order of windows": "taps last",
    "product of windows": "as it is",
    # torch's own function is the fastest way to x̂ of a layer norm on a CPU.
    "normalised input": "written",
    "sums of a normalised product": "of torch",
    "gradients of a group norm": {"sums of torch": _two_sums, "written": _written},
    # Small operations read their operands from a CPU's cache.
    "step of an LSTM": "spelled out",
    "cast of a recurrent input": "in each step",
    "gradients of steps": "in place",
    "sums by row": {"added": _added, "multiplied": _multiplied(35, 600)},
}

_ON: dict[str, Table] = {
    "cpu": {
        "gradient of an outer product": {"transposed": _lanes_transposed, "as it is": _lanes},
        "order of windows": {"channels last": _pieces_of_channels, "taps last": _pieces_of_rows},
    },
    "cuda": {
        "gradient of a kernel": {
            "kernel": _by_kernel,
            "samples as groups": _samples_as_groups(8),
            "windows": _by_windows,
        },
        "product of windows": {"transposed": _transposed, "as it is": _as_it_is},
        # Kernels of reductions normalise their input as they read it, with the statistics of the forward.
        "normalised input": "left to reductions",
        "gradients of a group norm": {
            "left to reductions": _left,
            "sums of torch": _two_sums,
            "written": _written,
        },
        # torch's own kernel is one launch, in the dtype of the states.
        "step of an LSTM": "fused",
        "sums by row": {"added": _added_by_atomics, "multiplied": _MULTIPLIED_ON_GPU},
        "cast of a recurrent input": "once",
    },
}

# A compiler would copy the whole result for each step written into it.
_IN: dict[str, Table] = {
    "traced": {"gradients of steps": "stacked"},
    "compiled": {
        "gradients of steps": "stacked",
        # A compiler fuses them with whatever computes the output gradient.
        "sums of a normalised product": "written",
        # The input's gradient needs these sums too: the compiler computes them once for both.
        "gradients of a group norm": "sums shared with the input's gradient",
    },
}

_COMPILED_ON_GPU: Table = {
    "sums by row": {"added": _added_by_compiler, "multiplied": _MULTIPLIED_ON_GPU},
}


def _chooser(machine: Machine) -> Chooser:
    """Builds a chooser: the tables of device, of mode and of both override the general one."""
    is_both = (machine.device, machine.mode) == ("cuda", "compiled")
    tables = _EVERYWHERE, _ON.get(machine.device, {}), _IN.get(machine.mode, {})
    return Chooser(*tables, _COMPILED_ON_GPU if is_both else {})


CHOOSERS = {machine: _chooser(machine) for machine in MACHINES.values()}
