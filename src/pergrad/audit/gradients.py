"""From a batch to its rows: loss, norms and sketch of each sample, by one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.dtypes import moved, own_dtype
from pergrad.audit.losses import loss_of_samples
from pergrad.audit.spec import Spec
from pergrad.engine import record
from pergrad.factors import Convolution, Factor, OuterProduct, wide
from pergrad.quantities import Batch, Norms, Projection, Quantity
from pergrad.reductions import SampleGradients
from pergrad.reductions.sketches import fourier_is_cheaper

__all__ = ["Gradients", "Rows", "joined_rows"]

# Fixed, and not a share of the memory that happens to be free: where a sum is cut into pieces, its
# rounding depends on the pieces.
_MAX_BYTES, _MAX_BYTES_ON_GPU = 32 * 2**20, 256 * 2**20


@dataclass(frozen=True)
class Rows:
    """What is known of each of a few samples."""

    loss: np.ndarray  # (n,) float64
    norm: np.ndarray  # (n,) float64
    group_norms: np.ndarray  # (n, groups) float64
    sketch: np.ndarray  # (n, k) float32, or float64 where the gradients are

    def __len__(self) -> int:
        return len(self.loss)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, in order."""
    return Rows(
        np.concatenate([part.loss for part in parts]),
        np.concatenate([part.norm for part in parts]),
        np.concatenate([part.group_norms for part in parts]),
        np.concatenate([part.sketch for part in parts]),
    )


class _Once(Quantity):
    """Makes the gradients of a small parameter once, where both norms and sketch would make them."""

    is_linear = True
    priority = 0

    def __init__(self, sketch_dim: int, max_bytes: int) -> None:
        self._sketch_dim = sketch_dim
        self._max_bytes = max_bytes

    def begin(self, batch: Batch) -> None: ...

    def consume(self, name: str, gradients: SampleGradients) -> None:
        dtype = wide(gradients.dtype)
        factors = gradients.factors
        entries = prod(gradients.shape) + max(factor.scratch for factor in factors)
        fits = gradients.count * entries * dtype.itemsize <= self._max_bytes
        if fits and all(self._is_sketched_by_entries(factor) for factor in factors):
            gradients.materialize(dtype)

    def _is_sketched_by_entries(self, factor: Factor) -> bool:
        if isinstance(factor, OuterProduct):
            _, o, i = factor.shape
            return not fourier_is_cheaper(factor.positions, o, i, self._sketch_dim)
        return isinstance(factor, Convolution)

    def end(self) -> None: ...


class Gradients:
    """Computes the rows of one batch after the other with one model."""

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        groups: Mapping[str, Sequence[str]],
        *,
        sketch_dim: int,
        seed: int,
    ) -> None:
        self._model = model
        self._loss = spec.loss
        self._dtype = own_dtype(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = parameters[0].device
        self._max_bytes = _MAX_BYTES_ON_GPU if self._device.type == "cuda" else _MAX_BYTES
        self._groups = len(groups)
        self._group_of = {
            name: number for number, names in enumerate(groups.values()) for name in names
        }
        # Kept from batch to batch, as its tables of random buckets are.
        self._projection = Projection(sketch_dim, seed)
        self._once = _Once(sketch_dim, self._max_bytes)

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch where the model is and in its type."""
        return tuple(moved(part, self._device, self._dtype) for part in batch)

    def rows(self, batch: tuple[Any, ...], count: int) -> Rows:
        """The rows of `count` samples."""
        arguments = self.arguments(batch)
        norms, projection = Norms(), self._projection
        quantities = (self._once, norms, projection)
        with record(self._model, *quantities, batch_size=count, max_bytes=self._max_bytes):
            losses = loss_of_samples(self._loss, self._model, arguments, count)
            losses.sum().backward()
        return Rows(
            losses.detach().double().cpu().numpy(),
            norms.result.double().cpu().numpy(),
            self._by_group(norms.per_param).cpu().numpy(),
            projection.result.cpu().numpy(),
        )

    def _by_group(self, per_param: Mapping[str, Tensor]) -> Tensor:  # (n, groups) float64
        squares = torch.stack(list(per_param.values())).double().square()
        number = torch.tensor([self._group_of[name] for name in per_param], device=squares.device)
        total = squares.new_zeros(self._groups, squares.shape[1])
        return total.index_add_(0, number, squares).sqrt().T.contiguous()
