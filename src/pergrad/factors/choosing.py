"""Says, for each device and mode, how factors and rules compute what has several ways.

Read the tables at the end from top to bottom: what every machine does, what a CPU and a GPU do otherwise, and
what changes where nothing runs yet (a trace) or where a compiler gets it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pergrad.runtime.choosing import NEVER, Chooser, Table
from pergrad.runtime.machine import MACHINES, machine_of

__all__ = ["CHOOSERS", "chooser_of", "transposed_is_cheaper"]


def chooser_of(t: Tensor) -> Chooser:
    """Gives the chooser of the machine that functions of the tensor run on."""
    return CHOOSERS[machine_of(t)]


# -- a gradient of (o, i), as one product a sample


def transposed_is_cheaper(o: int, i: int) -> bool:
    """Whether a CPU computes the (i, o) gradient faster, copy included.

    Rows of a result are computed in vectors of 16: a first convolution's 9 or 27 columns leave lanes empty.
    """
    return i % 16 != 0 and o % 16 == 0 and i < min(o, 64)


def _lanes(o: int, i: int) -> float:
    return 1.0


def _lanes_transposed(o: int, i: int) -> float:
    return 0.5 if transposed_is_cheaper(o, i) else NEVER


# -- the gradient of a convolution's kernel: `channels` and `taps` of one output, `positions` of one row


def _by_windows(channels: int, taps: int, positions: int, groups: int) -> float:
    """Positions whose windows are copied, at k·c reads each; their product runs at full speed."""
    return float(positions)


def _samples_as_groups(rate: int) -> Callable[[int, int, int, int], float]:
    """A grouped convolution, in positions whose windows could be copied meanwhile.

    It copies nothing, but is slow where the kernel outweighs the positions. The rates are those of
    `benchmarks/conv_ways.py` on a CPU and on an H200.
    """

    def cost(channels: int, taps: int, positions: int, groups: int) -> float:
        if taps == 1:
            return NEVER
        if channels == 1:
            return -1.0 if groups > 1 else NEVER
        return float(rate * channels) if channels >= 16 else NEVER

    return cost


# -- copies of windows, in pieces that lie side by side


def _pieces_of_channels(channels: int, width: int) -> float:
    return float(width)


def _pieces_of_rows(channels: int, width: int) -> float:
    return float(channels)


# -- group norm: `is_left`: reductions can normalise; `has_kernel`: torch sums up each sample by itself


def _left(is_left: bool, has_kernel: bool) -> float:
    return 0.0 if is_left else NEVER


def _two_sums(is_left: bool, has_kernel: bool) -> float:
    """Passes over the input: half as many as to write x̂, multiply it and sum up twice."""
    return 2.0 if has_kernel else NEVER


def _written(is_left: bool, has_kernel: bool) -> float:
    return 4.0


_EVERYWHERE: Table = {
    "gradient of an outer product": "as it is",
    "gradient of a kernel": {"samples as groups": _samples_as_groups(2), "windows": _by_windows},
    "order of windows": "taps last",
    # x̂ of a layer norm: torch's own function is the fastest way to it on a CPU.
    "normalised input": "written",
    "gradients of a group norm": {"sums of torch": _two_sums, "written": _written},
    # One step of an LSTM: small operations find what they need in a CPU's cache.
    "step of an LSTM": "spelled out",
    "cast of a recurrent input": "in each step",
    "gradients of steps": "in place",
}

_ON: dict[str, Table] = {
    "cpu": {
        "gradient of an outer product": {"transposed": _lanes_transposed, "as it is": _lanes},
        "order of windows": {"channels last": _pieces_of_channels, "taps last": _pieces_of_rows},
    },
    "cuda": {
        "gradient of a kernel": {
            "samples as groups": _samples_as_groups(8),
            "windows": _by_windows,
        },
        # Kernels of reductions normalise what they read, with the statistics of the forward.
        "normalised input": "left to reductions",
        "gradients of a group norm": {
            "left to reductions": _left,
            "sums of torch": _two_sums,
            "written": _written,
        },
        # One launch of torch's own kernel, in the type of the states.
        "step of an LSTM": "fused",
        "cast of a recurrent input": "once",
    },
}

# A compiler would copy the whole result for each step that is written to it.
_IN: dict[str, Table] = {
    "traced": {"gradients of steps": "stacked"},
    "compiled": {
        "gradients of steps": "stacked",
        # The sums are those of the input's gradient, computed once for both.
        "gradients of a group norm": "sums shared with the input's gradient",
    },
}

CHOOSERS = {
    machine: Chooser(_EVERYWHERE, _ON.get(machine.device, {}), _IN.get(machine.mode, {}))
    for machine in MACHINES.values()
}
