"""Adds per-sample gradients to `grad_sample`, the attribute of a weight in PyTorch's contract."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pergrad.errors import BatchSizeError
from pergrad.factors import Factor
from pergrad.runtime.queue import Queue

__all__ = ["GradSampleSink", "add_to_grad_sample", "check_batch_sizes"]


class GradSampleSink:
    """Adds every factor to the `grad_sample` of its weight as it arrives; for `ExpandedWeight`."""

    passes = 1

    def __init__(self, weights: Mapping[str, Tensor], scale: int) -> None:
        self.queue = Queue()
        self._weights = weights
        self._scale = scale

    def expects(self, name: str) -> bool:
        return True

    def add(self, name: str, factor: Factor) -> None:
        gradients = factor.materialize()
        add_to_grad_sample(
            self._weights[name], gradients if self._scale == 1 else gradients * self._scale
        )


def check_batch_sizes(earlier: Tensor | None, grads: Tensor) -> None:
    """Raises an error if the two batches have different sizes: their samples cannot correspond."""
    if earlier is not None and earlier.shape != grads.shape:
        raise BatchSizeError(
            f"a batch of {len(grads)} samples cannot add to the grad_sample of an earlier batch of "
            f"{len(earlier)}: set grad_sample to None between the batches"
        )


def add_to_grad_sample(weight: Tensor, grads: Tensor) -> None:
    """weight.grad_sample += grads, in the weight's dtype."""
    grads = grads.to(weight.dtype)
    earlier: Tensor | None = getattr(weight, "grad_sample", None)
    check_batch_sizes(earlier, grads)
    weight.grad_sample = grads if earlier is None else earlier + grads  # type: ignore[attr-defined]
