"""Calls the spec's loss and checks its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pergrad.audit.streaming.memory import is_out_of_memory
from pergrad.audit.subject.places import told
from pergrad.errors import AuditError, PergradError

__all__ = ["checked_losses", "loss_of_samples"]


def loss_of_samples(
    loss: Any,
    model: nn.Module,
    arguments: tuple[Any, ...],
    count: int,
    *,
    may_be_alone: bool = False,
) -> Tensor:
    """Returns the losses of the samples, (count,), or (1,) of one alone; refuses any other result."""
    try:
        found = loss(model, *arguments)
    except PergradError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise AuditError(f"spec.loss raised {told(error)}") from error
    return checked_losses(found, count, may_be_alone=may_be_alone)


def checked_losses(found: Any, count: int, *, may_be_alone: bool = False) -> Tensor:
    """Returns the losses if there is one for each sample, (count,); refuses anything else."""
    if not isinstance(found, Tensor):
        raise AuditError(
            f"spec.loss must return a tensor with the loss of each sample, shape ({count},), got "
            f"{type(found).__name__}"
        )
    if found.shape != (count,) and not (may_be_alone and found.shape == (1,)):
        hint = {
            0: "a scalar: do not average over the samples, for example with reduction='none'",
        }.get(found.dim(), f"shape {tuple(found.shape)}: sum or average over all other dimensions")
        raise AuditError(
            f"spec.loss must return the loss of each sample, shape ({count},), got {hint}"
        )
    if not found.requires_grad:
        raise AuditError(
            "spec.loss does not depend on any parameter that requires grad: was it computed under "
            "no_grad, or from a detached output?"
        )
    return found
