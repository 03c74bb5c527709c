"""Refuses losses that change with the number of samples in a batch, which is private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.looping.snapshots import Snapshot, undisturbed
from pergrad.errors import PrivacyError
from pergrad.private.stepping.pieces import NONE_SHARED, Shared, rows_of
from pergrad.runtime.tolerances import tolerance_of_rule

__all__ = ["check_sizes"]

_ROUGH = 0.05  # of numbers in half precision, which other kernels may round for another batch


def check_sizes(
    module: nn.Module,
    losses: Callable[..., Tensor],
    piece: tuple[Any, ...],
    rows: int,
    shared: Shared = NONE_SHARED,
) -> None:
    """Compares the losses of some samples in the whole batch and in a smaller one.

    One record more or less would move the gradients of all others, whose sum may then move by more than the
    bound. Exchanging samples does not show it: the size stays the same.
    """
    kept = rows // 2 if rows > 3 else rows - 1
    if not kept:
        return
    with undisturbed(module) as snapshot:
        whole, draws = _run(module, losses, piece, snapshot)
        modes = [(m, m.training) for m in module.modules()]
        try:
            if draws:  # another batch would draw other numbers
                for m in module.modules():
                    m.training = m.training and hasattr(m, "running_mean")
                whole, draws = _run(module, losses, piece, snapshot)
            if draws:
                return  # it cannot be told
            few, _ = _run(module, losses, rows_of(piece, rows, 0, kept, shared=shared), snapshot)
        finally:
            for m, was_training in modes:
                m.training = was_training
    if len(few) != kept:
        return  # samples are not rows of tensors
    a, b = whole[:kept].double(), few[:kept].double()
    is_rough = torch.is_autocast_enabled(whole.device.type) or any(
        p.is_floating_point() and p.element_size() < 4 for p in module.parameters()
    )
    tolerance = _ROUGH if is_rough else tolerance_of_rule(whole.dtype)
    differs = (a - b).abs() > tolerance * torch.maximum(a.abs(), b.abs())
    told = a.isfinite() & b.isfinite() & ((a != 0) | (b != 0))
    if 2 * int((differs & told).sum()) > int(told.sum()):
        raise PrivacyError(
            "the losses of samples change with the size of the batch, which is private: write the loss of "
            "each sample as it is by itself, without a division by the batch size (reduction='none')"
        )


def _run(
    module: nn.Module, losses: Callable[..., Tensor], piece: tuple[Any, ...], snapshot: Snapshot
) -> tuple[Tensor, bool]:
    """Returns the losses, and whether random numbers were drawn for them."""
    snapshot.restore()
    found = losses(module, *piece).detach()
    return found, not Snapshot(module).draws_as(snapshot)
