"""Computes the rows of a batch, loss, norms and sketch of each sample, by one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.streaming.norms_and_sketch import NormsAndSketch
from pergrad.audit.subject.dtypes import moved, own_dtype
from pergrad.audit.subject.spec import Spec
from pergrad.engine import certify, record
from pergrad.errors import AuditError

__all__ = ["Gradients", "Rows", "joined_rows"]

# Fixed rather than a share of the free memory: the rounding of a sum depends on how it is split.
_MAX_BYTES, _MAX_BYTES_ON_GPU = 32 * 2**20, 256 * 2**20


@dataclass(frozen=True)
class Rows:
    """Loss, norms and sketches of some samples."""

    loss: np.ndarray  # (n,) float64
    norm: np.ndarray  # (n,) float64
    group_norms: np.ndarray  # (n, groups) float64
    sketch: np.ndarray  # (n, k) float32, or float64 if the gradients are

    def __len__(self) -> int:
        return len(self.loss)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenates the rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.loss for part in parts]),
        np.concatenate([part.norm for part in parts]),
        np.concatenate([part.group_norms for part in parts]),
        np.concatenate([part.sketch for part in parts]),
    )


class Gradients:
    """Computes the rows of batches with one model."""

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
        # Reused for every batch: it holds the tables of random buckets.
        self._quantity = NormsAndSketch(sketch_dim, seed)

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Moves a batch to the model's device and dtype."""
        return tuple(moved(part, self._device, self._dtype) for part in batch)

    def rows(self, batch: tuple[Any, ...], count: int) -> Rows:
        """Computes the rows of a batch of `count` samples."""
        arguments = self.arguments(batch)
        quantity = self._quantity
        with record(self._model, quantity, batch_size=count, max_bytes=self._max_bytes):
            losses = loss_of_samples(self._loss, self._model, arguments, count)
            losses.sum().backward()
        squares = torch.stack(list(quantity.squares.values()))
        return Rows(
            losses.detach().double().cpu().numpy(),
            squares.sum(0).sqrt().cpu().numpy(),
            self._by_group(list(quantity.squares), squares).cpu().numpy(),
            quantity.sketch.cpu().numpy(),
        )

    def certified(self, batch: tuple[Any, ...], count: int) -> dict[str, Any]:
        """Proves gradients, norms and sketches of a batch; returns the facts, or why nothing is proved.

        Raises an error if they are wrong. Errors of the model itself come again in the pass over the data.
        """

        def losses(model: nn.Module, *arguments: Any) -> Tensor:
            return loss_of_samples(self._loss, model, arguments, count)

        try:
            report = certify(
                self._model,
                losses,
                *self.arguments(batch),
                quantities=[self._quantity],
                seed=0,
                quiet=True,
                batch_size=count,
                max_bytes=self._max_bytes,
            )
        except Exception as error:
            return {"ok": False, "reason": str(error) or type(error).__name__}
        if not report.ok:
            raise AuditError(
                f"the gradients of the first {count} samples are wrong (pass certify=False, or "
                f"--no-certify, to audit without a proof):\n{report}"
            )
        return {
            "ok": True,
            "samples": count,
            "parameters": len(report.rows),
            "largest_error": max(row.error for row in report.rows),
            "proved_in": report.rows[0].precision.removeprefix("torch."),
            "notes": list(report.notes),
        }

    def _by_group(self, names: list[str], squares: Tensor) -> Tensor:  # (n, groups) float64
        number = torch.tensor([self._group_of[name] for name in names], device=squares.device)
        total = squares.new_zeros(self._groups, squares.shape[1])
        return total.index_add_(0, number, squares).sqrt().T.contiguous()
