"""Passes over the data to fit a preconditioner: batches, and losses of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.audit.streaming.loading import drawing_from
from pergrad.errors import IndexingError
from pergrad.index.rows.computing import RowMaker
from pergrad.quantities import Quantity

__all__ = ["FitData", "Labels", "output_of", "sampled"]

Labels = Literal["given", "sampled"]
Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class FitData:
    """The batches of the data set that a preconditioner is fitted to, and what computes gradients of them."""

    maker: RowMaker
    batches: Callable[[], Iterator[tuple[int, tuple[Any, ...], int]]]  # start, arguments, samples
    seed: int = 0

    def run(self, number: int, quantity: Quantity, loss: Loss | None = None) -> int:
        """Feeds the gradients of all samples at one checkpoint to a quantity; returns the samples."""
        total, maker = 0, self.maker
        for start, arguments, count in self.batches():
            with drawing_from(self.seed, start):
                maker.run(maker.models[number], arguments, [quantity], count, loss)
            total += count
        return total


def output_of(model: nn.Module, loss: Loss, batch: tuple[Any, ...]) -> Tensor:
    """Returns the model's output within its loss, (n, outputs)."""
    kept: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, output: kept.append(output))
    try:
        loss(model, *batch)
    finally:
        handle.remove()
    if len(kept) != 1:
        raise IndexingError(
            f"the loss calls the model {len(kept)} times, but this preconditioner needs a loss that calls it "
            "once: take another one"
        )
    output = kept[0]
    output = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(output, Tensor):
        raise IndexingError(
            "the model returns neither a tensor nor logits, which this preconditioner needs"
        )
    return output


def sampled(loss: Loss) -> Loss:
    """Returns the cross-entropy of the model's logits with labels that are drawn from its own predictions."""

    def of_samples(model: nn.Module, *batch: Any) -> Tensor:
        logits = output_of(model, loss, batch)
        if logits.dim() == 1 or (logits.dim() == 2 and logits.shape[1] == 1):
            logits = logits.flatten()
            drawn = torch.bernoulli(logits.detach().sigmoid())
            return F.binary_cross_entropy_with_logits(logits, drawn, reduction="none")
        if logits.dim() != 2:
            raise IndexingError(
                f"labels are sampled from logits of shape (n, classes), got {tuple(logits.shape)}: pass "
                "labels='given'"
            )
        drawn = torch.multinomial(logits.detach().softmax(1), 1)[:, 0]
        return F.cross_entropy(logits, drawn, reduction="none")

    return of_samples
