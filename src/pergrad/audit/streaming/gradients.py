"""Computes the rows of a batch, loss, norms and sketch of each sample, by one backward pass.

Of classifiers also its label-free sketch, by a second one.
What is refused is computed sample by sample, where the samples do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.audit.streaming.label_free import (
    InTurn,
    LabelFree,
    checked_logits,
    checked_target,
    class_shares,
)
from pergrad.audit.streaming.losses import checked_losses, loss_of_samples
from pergrad.audit.streaming.pooling import pooling_in_pieces
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.audit.subject.dtypes import moved, own_dtype
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.sharding import device_of, is_sharded_model
from pergrad.audit.subject.spec import Spec
from pergrad.engine import record
from pergrad.engine.checking.first_batch import certified_first
from pergrad.engine.looping.fallback import Runner
from pergrad.engine.recording.options import Options
from pergrad.errors import AuditError, PergradError

__all__ = ["CLASSIFIED", "Gradients", "Rows", "joined_rows"]

CLASSIFIED = ("free", "target", "predicted", "probability")  # rows of classifiers alone

# Fixed rather than a share of the free memory: the rounding of a sum depends on how it is split.
_MAX_BYTES, _MAX_BYTES_ON_GPU = 32 * 2**20, 256 * 2**20
_MAX_BYTES_OF_LOOPS = 2**30  # of full gradients: with less, samples run several times


@dataclass(frozen=True)
class Rows:
    """Loss, norms and sketches of some samples."""

    loss: np.ndarray  # (n,) float64
    norm: np.ndarray  # (n,) float64
    group_norms: np.ndarray  # (n, groups) float64
    sketch: np.ndarray  # (n, k) float32, or float64 if the gradients are
    # Of classifiers alone:
    free: np.ndarray | None = None  # (n, checkpoints, k) sketches of label-free gradients
    target: np.ndarray | None = None  # (n,) int64, the class of the label
    predicted: np.ndarray | None = None  # (n,) int64, the class that the model predicts
    probability: np.ndarray | None = None  # (n, 2) float64, of the label and of the predicted class

    def __len__(self) -> int:
        return len(self.loss)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenates the rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0)
        return Rows(none, none, none, none)
    found: dict[str, Any] = {}
    for field in fields(Rows):
        arrays = [getattr(part, field.name) for part in parts]
        found[field.name] = None if arrays[0] is None else np.concatenate(arrays)
    return Rows(**found)


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
        free_dim: int = 512,
        checkpoints: Sequence[nn.Module] = (),
    ) -> None:
        self._model = model
        self._spec = spec
        self._loss = spec.loss
        self._free = LabelFree(free_dim, seed)
        # All processes run a sharded model together, so none may run other passes than the others.
        self._is_together = is_sharded_model(model)
        self._checkpoints = tuple(checkpoints)
        self._dtype = own_dtype(model)
        self._may_share = (
            not self._is_together
            and isinstance(spec.loss, LossOfLogits)
            and spec.logits is spec.loss.logits
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._device = device_of(model, None) if self._is_together else parameters[0].device
        self._max_bytes = _MAX_BYTES_ON_GPU if self._device.type == "cuda" else _MAX_BYTES
        self._groups = len(groups)
        self._group_of = {
            name: number for number, names in enumerate(groups.values()) for name in names
        }
        self._runner = Runner(None if self._is_together else "loop", warns=False)
        self.fallback: str | None = (
            None  # why batches are computed sample by sample, where they are
        )
        # Reused for every batch: it holds the tables of random buckets. The map is that of an index, which an
        # audit may leave.
        self._quantity = NormsAndSketch(sketch_dim, seed)

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Moves a batch to the model's device and dtype."""
        return tuple(moved(part, self._device, self._dtype) for part in batch)

    def rows(self, batch: tuple[Any, ...], count: int) -> Rows:
        """Computes the rows of a batch of `count` samples."""
        arguments = self.arguments(batch)
        quantity = self._quantity
        quantity.reset()
        found: dict[str, Any] = {}
        losses = self._shared(arguments, count, found)
        if losses is None:
            losses = self._run(self._model, self._losses(count), arguments, quantity, count)
            if self._spec.logits is not None:
                free, logits = self._label_free(self._model, arguments, count)
                found = {"free": free, **self._classes(logits, arguments, count)}
        if "free" in found:
            others = [self._label_free(m, arguments, count)[0] for m in self._checkpoints]
            found["free"] = torch.stack([*others, found["free"]], dim=1).cpu().numpy()
        squares = torch.stack(list(quantity.squares.values()))
        return Rows(
            losses.double().cpu().numpy(),
            squares.sum(0).sqrt().cpu().numpy(),
            self._by_group(list(quantity.squares), squares).cpu().numpy(),
            quantity.sketch.cpu().numpy(),
            **found,
        )

    def _run(
        self,
        model: nn.Module,
        losses: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        quantity: NormsAndSketch,
        count: int,
    ) -> Tensor:
        """Fills the quantity by one backward pass, or sample by sample where that is refused."""
        quantity.reset()
        bound = _MAX_BYTES_OF_LOOPS if self.fallback else self._max_bytes
        options = Options(batch_size=count, max_bytes=bound, loss_reduction="sum")
        key = (count, id(model), quantity is self._quantity)
        found = self._runner.run(model, losses, arguments, [quantity], options, key=key)
        self.fallback = self._runner.why or self.fallback
        return found

    def _shared(
        self, arguments: tuple[Any, ...], count: int, found: dict[str, Any]
    ) -> Tensor | None:
        """Computes both gradients from one forward pass; None if they must be computed apart.

        They must if the loss is not one of the logits alone, if the batch is refused, and if the first
        backward pass leaves a parameter out: what it has collected of it could not be told from what the
        second one adds.
        """
        loss = self._loss
        if not self._may_share or not isinstance(loss, LossOfLogits):
            return None
        both = InTurn(self._quantity, self._free.quantity)
        options: dict[str, Any] = {"batch_size": count, "max_bytes": self._max_bytes}
        try:
            with record(self._model, both, loss_reduction="sum", **options):
                with pooling_in_pieces(self._model):
                    logits = checked_logits(loss.logits, self._model, arguments, count)
                losses = checked_losses(loss.of_logits(logits, *arguments), count)
                losses.sum().backward(retain_graph=True)
                is_whole = both.turn()
                self._free.of_logits(logits).sum().backward()
        except AuditError:
            raise
        except PergradError:
            is_whole = False
        if not is_whole:
            self._may_share = False
            return None
        found.update(self._classes(logits.detach(), arguments, count))
        found["free"] = self._free.quantity.sketch
        return losses.detach()

    def _label_free(
        self, model: nn.Module, arguments: tuple[Any, ...], count: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the sketches of the label-free gradients, (n, k), and the logits."""
        logits_of = self._spec.logits
        assert logits_of is not None

        def contracted(model: nn.Module, *batch: Any) -> Tensor:
            with pooling_in_pieces(model):
                logits = checked_logits(logits_of, model, batch, None)
            return self._free.of_logits(logits)

        self._run(model, contracted, arguments, self._free.quantity, count)
        with torch.no_grad(), pooling_in_pieces(model):
            logits = checked_logits(logits_of, model, arguments, count)
        return self._free.quantity.sketch, logits

    def _classes(
        self, logits: Tensor, arguments: tuple[Any, ...], count: int
    ) -> dict[str, np.ndarray]:
        shares = class_shares(logits.detach())
        predicted = shares.argmax(1)
        found = {"predicted": predicted.cpu().numpy()}
        of_predicted = shares.gather(1, predicted[:, None])[:, 0]
        own = torch.full_like(of_predicted, torch.nan)
        if self._spec.target is not None:
            target = checked_target(self._spec.target, arguments, count, shares.shape[1])
            chosen = shares.gather(1, target.clamp(min=0)[:, None])[:, 0]
            own = torch.where(target >= 0, chosen, own)
            found["target"] = target.cpu().numpy()
        found["probability"] = torch.stack([own, of_predicted], dim=1).cpu().numpy()
        return found

    def certified(
        self, batch: tuple[Any, ...], count: int, *, gathers: bool = True
    ) -> dict[str, Any]:
        """Proves gradients, norms and sketches of a batch; returns the facts, or why nothing is proved.

        Raises an error if they are wrong. Errors of the model itself come again in the pass over the data.
        A sharded model is gathered in each process, unless `gathers` is False.
        """
        return certified_first(
            self._model,
            self._losses_as_they_are(count),
            self.arguments(batch),
            count,
            max_bytes=self._max_bytes,
            error=AuditError,
            purpose="audit",
            quantities=[self._quantity],
            fallback=None if self._is_together else "loop",
            gathers=gathers,
        )

    def _losses(self, count: int) -> Callable[..., Tensor]:
        def losses(model: nn.Module, *arguments: Any) -> Tensor:
            with pooling_in_pieces(model):
                return loss_of_samples(self._loss, model, arguments, count, may_be_alone=True)

        return losses

    def _losses_as_they_are(self, count: int) -> Callable[..., Tensor]:
        """Returns the losses without words for their errors, which in a proof may be of its precision."""

        def losses(model: nn.Module, *arguments: Any) -> Tensor:
            with pooling_in_pieces(model):
                return checked_losses(self._loss(model, *arguments), count, may_be_alone=True)

        return losses

    def _by_group(self, names: list[str], squares: Tensor) -> Tensor:  # (n, groups) float64
        number = torch.tensor([self._group_of[name] for name in names], device=squares.device)
        total = squares.new_zeros(self._groups, squares.shape[1])
        return total.index_add_(0, number, squares).sqrt().T.contiguous()
