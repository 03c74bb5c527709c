"""Computes the rows and the whole gradients of batches, at each checkpoint of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.streaming.norms_and_sketch import NormsAndSketch
from pergrad.audit.subject.dtypes import moved, own_dtype
from pergrad.engine import certify
from pergrad.engine.looping.fallback import Runner
from pergrad.engine.recording.options import Options
from pergrad.errors import FallbackWarning, IndexingError
from pergrad.index.rows.projecting import ProjectedRows, made_projector
from pergrad.index.rows.tokens import TokenRows
from pergrad.quantities import Grads, Quantity

__all__ = ["BatchRows", "RowMaker", "trained_shapes"]

Loss = Callable[..., Tensor]
# Fixed rather than a share of the free memory: the rounding of a sum depends on how it is split.
_MAX_BYTES, _MAX_BYTES_ON_GPU = 32 * 2**20, 256 * 2**20
_MAX_BYTES_OF_LOOPS = 2**30  # of full gradients: with less, samples run several times


@dataclass(frozen=True)
class BatchRows:
    """Rows of one batch at all checkpoints."""

    rows: list[Tensor]  # of each checkpoint, (n, width)
    loss: Tensor  # (samples, c) float64
    norm: Tensor  # (n, c) float64
    owner: Tensor | None = None  # (n,) the sample of each row, in rows of tokens
    token: Tensor | None = None  # (n,) the position of each row


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the shapes of the parameters that have a gradient, by name."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


class RowMaker:
    """Computes rows with one projection at several checkpoints of a model.

    Args:
        models: the checkpoints, on one device.
        loss: called as loss(model, *batch); returns (n,) losses.
        projection: the kind of the linear map.
        dim: the numbers of a row.
        seed: selects the linear map.
        mask: called as mask(*batch); returns (n, t), the tokens that get a row each. None: rows of samples.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss,
        projection: str,
        dim: int,
        seed: int,
        mask: Callable[..., Tensor] | None = None,
    ) -> None:
        self.models = list(models)
        self.loss = loss
        first = self.models[0]
        self.shapes = trained_shapes(first)
        self.device = next(p for p in first.parameters() if p.requires_grad).device
        self._dtype = own_dtype(first)
        self._mask = mask
        self._max_bytes = _MAX_BYTES_ON_GPU if self.device.type == "cuda" else _MAX_BYTES
        self.projector = made_projector(projection, self.shapes, dim, seed, self.device)
        self._quantity: ProjectedRows | NormsAndSketch | TokenRows
        if mask is not None:
            self._quantity = TokenRows(self.projector)
        elif projection == "count":
            self._quantity = NormsAndSketch(dim, seed)  # faster, and the same map
        else:
            self._quantity = ProjectedRows(self.projector)
        self._runner = Runner("loop" if mask is None else None, warns=False)
        self.fallback: str | None = None  # why batches are computed sample by sample

    @property
    def width(self) -> int:
        return self.projector.width

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Moves a batch to the model's device and dtype."""
        return tuple(moved(part, self.device, self._dtype) for part in batch)

    def rows(self, batch: tuple[Any, ...], count: int) -> BatchRows:
        """Computes the rows of a batch of `count` samples."""
        arguments = self.arguments(batch)
        quantity = self._quantity
        found, losses, norms = [], [], []
        owner = token = None
        if isinstance(quantity, TokenRows):
            assert self._mask is not None
            quantity.mask = checked_mask(self._mask(*arguments), count)
            owner, token = quantity.mask.nonzero(as_tuple=True)
        for model in self.models:
            losses.append(self.run(model, arguments, [quantity], count).double())
            squares = torch.stack(list(quantity.squares.values())).sum(0)
            norms.append(squares.sqrt())
            rows = quantity.sketch if isinstance(quantity, NormsAndSketch) else quantity.rows
            found.append(rows)
        return BatchRows(found, torch.stack(losses, 1), torch.stack(norms, 1), owner, token)

    def gradients(self, number: int, batch: tuple[Any, ...], count: int) -> dict[str, Tensor]:
        """Returns the whole gradients of a batch at one checkpoint, (n, *shape) by name."""
        grads = Grads()
        self.run(self.models[number], self.arguments(batch), [grads], count)
        return grads.result

    def run(
        self,
        model: nn.Module,
        arguments: tuple[Any, ...],
        quantities: Sequence[Quantity],
        count: int,
        loss: Loss | None = None,
    ) -> Tensor:
        """Fills the quantities by one backward pass, or sample by sample where that is refused."""
        for quantity in quantities:
            quantity.reset()
        bound = _MAX_BYTES_OF_LOOPS if self.fallback else self._max_bytes
        options = Options(batch_size=count, max_bytes=bound, loss_reduction="sum")
        key = (count, id(model), *(type(quantity) for quantity in quantities))
        losses = self.losses(count, loss)
        found = self._runner.run(model, losses, arguments, quantities, options, key=key)
        self.fallback = self._runner.why or self.fallback
        return found

    def losses(self, count: int, loss: Loss | None = None) -> Loss:
        """Returns the loss function, with its result checked."""
        chosen = self.loss if loss is None else loss

        def losses(model: nn.Module, *arguments: Any) -> Tensor:
            return loss_of_samples(chosen, model, arguments, count, may_be_alone=True)

        return losses

    def certified(self, batch: tuple[Any, ...], count: int) -> dict[str, Any]:
        """Proves the gradients of a batch; returns the facts, or why nothing is proved.

        Raises an error if they are wrong. Errors of the model itself come again in the pass over the data.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                report = certify(
                    self.models[-1],
                    self.losses(count),
                    *self.arguments(batch),
                    seed=0,
                    quiet=True,
                    fallback="loop",
                    batch_size=count,
                    max_bytes=self._max_bytes,
                    loss_reduction="sum",
                )
        except Exception as error:
            return {"ok": False, "reason": str(error) or type(error).__name__}
        if not report.ok:
            raise IndexingError(
                f"the gradients of the first {count} samples are wrong (pass certify=False, or "
                f"--no-certify, to build without a proof):\n{report}"
            )
        return {
            "ok": True,
            "samples": count,
            "parameters": len(report.rows),
            "largest_error": max(row.error for row in report.rows),
            "proved_in": report.rows[0].precision.removeprefix("torch."),
        }


def checked_mask(found: Any, count: int) -> Tensor:
    """Returns the mask of tokens, (count, t) bool; refuses any other result."""
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != count:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise IndexingError(
            f"tokens must return which tokens of a batch get a row, shape ({count}, t), got {got}"
        )
    return found.bool()
