"""Calls the spec's loss and checks its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pergrad.audit.streaming.memory import is_out_of_memory
from pergrad.errors import AuditError, PergradError

__all__ = ["loss_of_samples"]


def loss_of_samples(loss: Any, model: nn.Module, arguments: tuple[Any, ...], count: int) -> Tensor:
    """Returns the losses of the samples, (count,); refuses any other result."""
    try:
        found = loss(model, *arguments)
    except PergradError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise AuditError(f"spec.loss raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor):
        raise AuditError(
            f"spec.loss must return a tensor with the loss of each sample, shape ({count},), got "
            f"{type(found).__name__}"
        )
    if found.shape != (count,):
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
