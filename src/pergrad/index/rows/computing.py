"""Computes the rows and the whole gradients of batches, at each checkpoint of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.audit.subject.dtypes import moved, own_dtype
from pergrad.engine.checking.first_batch import certified_first
from pergrad.engine.compiling.step import CompiledStep, compiled
from pergrad.engine.looping.fallback import Runner
from pergrad.engine.recording.options import Options
from pergrad.errors import IndexingError
from pergrad.index.rows.projecting import ProjectedRows, made_projector
from pergrad.index.rows.tokens import TokenRows
from pergrad.index.rows.transferring import pinned
from pergrad.quantities import Grads, Quantity

__all__ = ["BatchRows", "RowMaker", "trained_shapes"]

Loss = Callable[..., Tensor]
# Fixed rather than a share of the free memory: the rounding of a sum depends on how it is split.
_MAX_BYTES, _MAX_BYTES_ON_GPU = 32 * 2**20, 2**30
_MAX_BYTES_OF_LOOPS = 2**30  # of full gradients: with less, samples run several times


@dataclass(frozen=True)
class BatchRows:
    """Rows of one batch at all checkpoints."""

    rows: list[Tensor]  # of each checkpoint, (n, width)
    loss: Tensor  # (samples, c) float64
    norm: Tensor  # (n, c) float64, of whole gradients or of the rows
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
        compiles: compile the steps for rows of samples, as `pergrad.compiled` does.
        norms: "exact" or "estimated" by the lengths of the rows; None: exact on a CPU.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss: Loss,
        projection: str,
        dim: int,
        seed: int,
        mask: Callable[..., Tensor] | None = None,
        *,
        compiles: bool = False,
        norms: str | None = None,
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
        is_exact = norms == "exact" or (norms is None and self.device.type == "cpu")
        self._quantity: ProjectedRows | NormsAndSketch | TokenRows
        if mask is not None:
            self._quantity = TokenRows(self.projector, norms=is_exact)
        elif projection == "count" and self.device.type == "cpu" and is_exact and not compiles:
            self._quantity = NormsAndSketch(dim, seed)  # faster, and the same map
        else:
            self._quantity = ProjectedRows(self.projector, norms=is_exact)
        self._runner = Runner("loop" if mask is None else None, warns=False)
        self.fallback: str | None = None  # why batches are computed sample by sample
        self.compiles = compiles
        self.why_uncompiled: str | None = None  # the reason, if steps cannot be compiled
        self._steps: dict[tuple[int, int], CompiledStep] = {}  # by model and samples

    @property
    def width(self) -> int:
        return self.projector.width

    def arguments(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """Moves a batch to the model's device and dtype."""
        batch = pinned(batch, self.device)
        return tuple(moved(part, self.device, self._dtype) for part in batch)

    def rows_each(self, batch: tuple[Any, ...], count: int) -> int:
        """Returns the rows of a sample: 1, or the mean number of tokens, rounded up."""
        if self._mask is None:
            return 1
        mask = checked_mask(self._mask(*self.arguments(batch)), count)
        return -(-int(mask.sum()) // count)

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
            losses.append(self._row_step(model, arguments, quantity, count).double())
            if isinstance(quantity, NormsAndSketch):
                found.append(quantity.sketch)
                norms.append(torch.stack(list(quantity.squares.values())).sum(0).sqrt())
            else:
                found.append(quantity.rows)
                norms.append(
                    quantity.rows.double().norm(dim=1)
                    if quantity.squares is None
                    else quantity.squares.sqrt()
                )
        return BatchRows(found, torch.stack(losses, 1), torch.stack(norms, 1), owner, token)

    def _row_step(
        self, model: nn.Module, arguments: tuple[Any, ...], quantity: Quantity, count: int
    ) -> Tensor:
        """Fills the quantity, by a compiled step if there is one; returns the losses."""
        key = (id(model), count)
        is_traceable = isinstance(quantity, ProjectedRows) and self.fallback is None
        if not (self.compiles and is_traceable):
            return self.run(model, arguments, [quantity], count)
        if key not in self._steps:
            losses = self.run(model, arguments, [quantity], count)  # refused batches fall back here
            if self.fallback is None:
                self._steps[key] = compiled(
                    model,
                    self.losses(count),
                    quantity,
                    batch_size=count,
                    max_bytes=self._max_bytes,
                    loss_reduction="sum",
                )
            return losses
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            losses = self._steps[key](*arguments)
        for warning in told:
            if str(warning.message).startswith("pergrad.compiled: "):
                self.why_uncompiled = str(warning.message).removeprefix("pergrad.compiled: ")
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        return losses

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
        return certified_first(
            self.models[-1],
            self.losses(count),
            self.arguments(batch),
            count,
            max_bytes=self._max_bytes,
            error=IndexingError,
            purpose="build",
        )


def checked_mask(found: Any, count: int) -> Tensor:
    """Returns the mask of tokens, (count, t) bool; refuses any other result."""
    if not isinstance(found, Tensor) or found.dim() != 2 or len(found) != count:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise IndexingError(
            f"tokens must return which tokens of a batch get a row, shape ({count}, t), got {got}"
        )
    return found.bool()
