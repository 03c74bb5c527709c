"""A recorded region: what is put in place around it and taken away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.intercepting.journal import Journal
from pergrad.engine.recording.options import LossReduction, Options
from pergrad.engine.recording.recording import Recording, check_module
from pergrad.errors import PergradError, ScopeError
from pergrad.quantities import Quantity

__all__ = ["recorded", "reduced", "run_recorded"]


@contextmanager
def recorded(
    module: nn.Module,
    quantities: Sequence[Quantity],
    options: Options,
    *,
    journal: Journal | None = None,
) -> Iterator[None]:
    """Within, functions are recorded; at the end the quantities have their results.

    `journal` is for those who want to know how it was done.
    """
    check_module(module)
    recording = Recording(module, quantities, options, journal)

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording.enter_forward(args, kwargs)

    def after_forward(*_: Any) -> None:
        recording.leave_forward()

    before = module.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
    after = module.register_forward_hook(after_forward, always_call=True)
    try:
        with recording.collecting(), recording.intercepting():
            if options.batch_size is not None:
                recording.begin(options.batch_size)
            yield
            recording.check_complete()
    finally:
        before.remove()
        after.remove()
        recording.clean_up()


def run_recorded(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Sequence[Any],
    quantities: Sequence[Quantity],
    options: Options,
    *,
    journal: Journal | None = None,
) -> Tensor:
    """What loss_fn(model, *batch) gives; its backward has filled the quantities."""
    with recorded(model, quantities, options, journal=journal):
        losses = loss_fn(model, *batch)
        reduced(losses, options.loss_reduction).backward()
    return losses.detach()


def reduced(loss: Any, loss_reduction: LossReduction) -> Tensor:
    """The scalar to start a backward from, of what a loss function has returned."""
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
