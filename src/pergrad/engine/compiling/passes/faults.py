"""Calls torch's own kernels where the compiler's are known to give other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from pergrad.engine.compiling.passes.graph import calls
from pergrad.runtime import operation

__all__ = ["avoid_faults"]

_aten = torch.ops.aten


def avoid_faults(graph: Graph) -> None:
    """Replaces calls that the compiler gets wrong, in place.

    The gradient of an average over windows that overhang (`ceil_mode`): the compiler divides by the whole
    window, where torch divides by the part that lies in the padded input (pytorch issue 198119).
    """
    for wrong, right in _BY_TORCH.items():
        for node in calls(graph, wrong):
            *_, may_overhang, counts_padding, divisor = node.args
            if may_overhang and counts_padding and divisor is None:
                node.target = right


def _by_torch(name: str, backward: Any) -> Any:
    """Registers torch's own gradient of an average as an operator that the compiler calls as it is."""

    @operation(name, backward)
    def gradient(
        g: Tensor,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        may_overhang: bool,
        counts_padding: bool,
        divisor: int | None,
    ) -> Tensor:
        found: Tensor = backward(
            g, x, kernel, stride, padding, may_overhang, counts_padding, divisor
        )
        return found

    return getattr(torch.ops.pergrad, name).default


_BY_TORCH = {
    _aten.avg_pool2d_backward.default: _by_torch("average_backward_2d", _aten.avg_pool2d_backward),
    _aten.avg_pool3d_backward.default: _by_torch("average_backward_3d", _aten.avg_pool3d_backward),
}
