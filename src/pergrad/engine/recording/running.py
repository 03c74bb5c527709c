"""Runs a loss function recorded, with its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.collecting.journal import Journal
from pergrad.engine.recording.loss_units import EvenSamples
from pergrad.engine.recording.modules import leaving_grads
from pergrad.engine.recording.options import LossReduction, Options
from pergrad.engine.recording.recording import recorded
from pergrad.errors import PergradError, ScopeError
from pergrad.quantities import Quantity

__all__ = ["check_loss_fn", "reduced", "run_recorded"]


def run_recorded(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    quantities: Sequence[Quantity],
    options: Options,
    *,
    journal: Journal | None = None,
) -> Tensor:
    """Returns loss_fn(model, *batch), detached; its backward pass fills the quantities.

    Gradients are computed within `torch.no_grad()`, too: they are what was asked for.
    """
    check_loss_fn(loss_fn)
    with (
        torch.enable_grad(),
        recorded(model, quantities, options, journal=journal, batch=batch) as recording,
    ):
        recording.mark_batch(loss_fn, batch)
        losses = recording.separated(recording.by_sample(loss_fn(model, *batch)))
        with recording.taking_losses():
            total = reduced(losses, options.loss_reduction)
        recording.check_losses(losses)
        with leaving_grads(recording.own):
            total.backward()
        for quantity in quantities:
            if isinstance(quantity, EvenSamples):
                quantity.uneven = list(recording.uneven)
                quantity.misplaced = list(recording.misplaced)
    return losses.detach()


def check_loss_fn(loss_fn: Any) -> None:
    """Refuses what cannot be called as loss_fn(model, *batch), and calls where autograd is off for good."""
    if not callable(loss_fn):
        raise PergradError(
            f"loss_fn must be a function, called as loss_fn(model, *batch); got {type(loss_fn).__name__}: "
            "pass it between the model and the batch"
        )
    if torch.is_inference_mode_enabled():
        raise ScopeError(
            "torch.inference_mode() keeps autograd from recording anything: compute gradients outside of it"
        )


def reduced(loss: Any, loss_reduction: LossReduction) -> Tensor:
    """Reduces what a loss function returned to the scalar that a backward pass starts from."""
    if not isinstance(loss, Tensor) or loss.dim() > 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise PergradError(
            f"loss_fn must return the losses of the samples, (B,), or a scalar; got {got}"
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        raise ScopeError(
            "the loss does not depend on any parameter that requires grad: unfreeze one, or, where an "
            "adapter is merged into a frozen model, unmerge it"
        )
    if loss.dim() == 0:
        return loss
    return loss.mean() if loss_reduction == "mean" else loss.sum()
