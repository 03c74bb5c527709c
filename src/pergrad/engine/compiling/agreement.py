"""Compares what a graph gives with what an uncompiled run of the same batch gives, once for each graph.

A compiler has faults of its own. One that shows in the gradients alone leaves the losses right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.recording.arguments import leaves
from pergrad.errors import PergradError
from pergrad.quantities import Quantity
from pergrad.runtime.tolerances import largest

__all__ = ["Summary"]

_MOST = 1 << 20  # entries; of larger tensors the norms of rows are kept
_OF_LOSSES = 0.1, 0.02, 1e-3  # in low precision, in products of TensorFloat32, and otherwise
_OF_RESULTS = 0.25, 0.05, 1e-3


@dataclass(frozen=True)
class Summary:
    """The losses of a step, and the results of its quantities, or the norms of their rows."""

    losses: Tensor
    results: list[tuple[str, list[Tensor]]]  # by the quantity's class

    @classmethod
    def of(cls, losses: Tensor, quantities: Sequence[Quantity]) -> Summary:
        """Summarises what a step has given; a quantity without a result is left out."""
        results = []
        for quantity in quantities:
            own = leaves(_result_of(quantity))
            tensors = [_shortened(t.detach()) for t in own if isinstance(t, Tensor)]
            results.append((type(quantity).__name__, tensors))
        return cls(losses.detach(), results)

    def differs_from(self, expected: Summary, *, is_rough: bool) -> str:
        """Names what is not as expected, but for the rounding of another order; empty if all is."""
        degree = _degree(expected.losses, is_rough)
        if not _are_alike([self.losses], [expected.losses], _OF_LOSSES[degree]):
            return "losses"
        for (name, found), (_, wanted) in zip(self.results, expected.results, strict=True):
            if not _are_alike(found, wanted, _OF_RESULTS[degree]):
                return f"results of {name}"
        return ""


def _result_of(quantity: Quantity) -> Any:
    try:
        return getattr(quantity, "result", None)
    except PergradError:  # it needs further steps
        return None


def _shortened(t: Tensor) -> Tensor:
    is_long = t.numel() > _MOST and t.dim() > 1 and t.is_floating_point()
    return torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=torch.float32) if is_long else t


def _degree(losses: Tensor, is_rough: bool) -> int:
    """Returns which of the three tolerances holds."""
    if is_rough or losses.dtype.itemsize < 4:
        return 0
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    may_round = losses.is_cuda and losses.dtype == torch.float32
    return 1 if may_round and any(b.allow_tf32 for b in backends) else 2


def _are_alike(found: Sequence[Tensor], wanted: Sequence[Tensor], close: float) -> bool:
    """Whether the tensors have the same shapes, and numbers as near as that to the wanted ones.

    Errors are relative to the largest entry of all of them. Integers are not compared.
    """
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return False
    both = zip(found, wanted, strict=True)
    pairs = [(a, b) for a, b in both if b.is_floating_point() and b.numel()]
    if not all(bool(b.isfinite().all()) for _, b in pairs):
        return True
    scale = max((largest(b) for _, b in pairs), default=0.0)
    return all(largest(a - b) <= close * max(scale, 1e-30) for a, b in pairs)
