"""Keeps an optimizer of a private run from applying gradients without noise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pergrad.errors import PrivacyError
from pergrad.private.stepping.noise import local_of

__all__ = ["guarded", "updating"]

_updating: set[int] = set()  # ids of optimizers that a private step has called


def guarded(optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Refuses gradients that no private step has made; `remove()` of the result ends this."""
    return optimizer.register_step_pre_hook(_refuse)


@contextmanager
def updating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Lets the optimizer step within the block."""
    _updating.add(id(optimizer))
    try:
        yield
    finally:
        _updating.discard(id(optimizer))


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if id(optimizer) in _updating:
        return
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        # Zeros tell nothing; torch.distributed.checkpoint makes a step with them.
        if p.grad is not None and not _is_zero(local_of(p.grad)):
            raise PrivacyError(
                "optimizer.step() was called with gradients that have no noise: a private Step calls its "
                "optimizer itself, so leave out backward() and optimizer.step(); train on public data with "
                "another optimizer"
            )


def _is_zero(grad: Tensor) -> bool:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return not bool(values.count_nonzero())
