"""Computes label-free gradients: of logits · v for one fixed random v, which knows nothing of labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pergrad.audit.streaming.memory import is_out_of_memory
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.audit.subject.places import told
from pergrad.errors import AuditError, PergradError
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients

__all__ = ["InTurn", "LabelFree", "checked_logits", "checked_target", "class_shares"]


class LabelFree:
    """Contracts logits with a random direction, and sketches the gradients of the result."""

    def __init__(self, dim: int, seed: int) -> None:
        self.quantity = NormsAndSketch(dim, seed + 1, has_norms=False)
        self._seed = seed

    def of_logits(self, logits: Tensor) -> Tensor:  # (n, classes) -> (n,)
        """Logits · v; v sums to zero, since a shift of all logits changes no prediction."""
        generator = torch.Generator().manual_seed(self._seed)
        v = torch.randn(logits.shape[1], generator=generator, dtype=torch.float64)
        if len(v) > 1:
            v = v - v.mean()
        return logits @ v.to(logits)


class InTurn(Quantity):
    """Feeds one quantity in a first backward pass and another one, linear in the gradients, in a second."""

    is_linear = True

    def __init__(self, first: Quantity, second: Quantity) -> None:
        self._first, self._second = first, second
        self._current = first
        self._missing: set[str] = set()

    def begin(self, batch: Batch) -> None:
        self._current = self._first
        self._batch = batch
        self._missing = set(batch.parameters)
        self._first.begin(batch)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        self._missing.discard(name)
        self._current.consume(name, gradients)

    def turn(self) -> bool:
        """Ends the first quantity and begins the second; returns whether the first got every parameter."""
        self._first.end()
        self._current = self._second
        self._second.begin(self._batch)
        return not self._missing

    def end(self) -> None:
        self._current.end()

    def abandon(self) -> None:
        self._first.abandon()
        self._second.abandon()


def checked_logits(
    logits: Any, model: nn.Module, arguments: tuple[Any, ...], count: int | None
) -> Tensor:
    """Returns the logits, (count, classes); refuses any other result. None: any count."""
    try:
        found = logits(model, *arguments)
    except PergradError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise AuditError(f"spec.logits raised {told(error)}") from error
    if isinstance(found, Tensor) and found.dim() == 1:
        found = found[:, None]
    is_right = isinstance(found, Tensor) and found.dim() == 2 and count in (None, len(found))
    if not is_right:
        what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise AuditError(
            f"spec.logits must return logits of shape ({count or 1}, classes), got {what}"
        )
    assert isinstance(found, Tensor)
    return found


def checked_target(target: Any, arguments: tuple[Any, ...], count: int, classes: int) -> Tensor:
    """Returns the classes of the labels, (count,) int64, negative where unknown; refuses any other result."""
    try:
        found = target(*arguments)
    except Exception as error:
        raise AuditError(f"spec.target raised {told(error)}") from error
    if not isinstance(found, Tensor) or found.shape != (count,) or found.is_floating_point():
        what = (
            f"{found.dtype} of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else type(found).__name__
        )
        raise AuditError(
            f"spec.target must return whole numbers of shape ({count},), the classes, got {what}"
        )
    if int(found.max()) >= classes:
        raise AuditError(
            f"spec.target returned the class {int(found.max())}, and spec.logits have the classes 0 to "
            f"{classes - 1}: return classes that start at 0, and a negative number for an unknown label"
        )
    return found.long()


def class_shares(logits: Tensor) -> Tensor:  # (n, classes) -> (n, classes), or (n, 2) for one logit
    """Returns the probabilities of the classes, in float64; one logit stands for two classes."""
    if logits.shape[1] == 1:
        positive = logits.double().sigmoid()
        return torch.cat([1 - positive, positive], dim=1)
    return logits.double().softmax(1)
