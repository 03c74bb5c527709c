"""Finds common mistakes of a spec before an audit begins: training mode, randomness, a divided loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from pergrad.distributed.sharding import is_sharded
from pergrad.errors import AuditError

__all__ = ["TRAINING", "notes_of_mode", "notes_of_randomness", "refuse_divided_loss"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CLOSE = 1e-3
TRAINING = "the model is in training mode"


def notes_of_mode(model: nn.Module) -> list[str]:
    """Returns a note if the model draws at random, or else behaves as in training.

    Of a sharded model, each process checks the values that it holds.

    >>> notes_of_mode(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).train())
    ["dropout is on in '1' (p=0.1): losses and gradients are random; call model.eval() before the audit"]
    """
    for name, module in model.named_modules():
        rate = getattr(module, "p", getattr(module, "dropout", 0.0))
        draws = isinstance(module, (*_DROPOUTS, nn.RNNBase)) and isinstance(rate, float | int)
        if module.training and draws and rate > 0:
            return [
                f"dropout is on in {name!r} (p={rate:g}): losses and gradients are random; call model.eval() "
                "before the audit"
            ]
    for name, parameter in model.named_parameters():
        own = cast(Any, parameter).to_local() if is_sharded(parameter) else parameter
        if own.is_floating_point() and not bool(torch.isfinite(own).all()):
            return [f"parameter {name!r} has values that are not finite: the training has diverged"]
    if any(m.training and isinstance(m, _BATCH_NORMS) for m in model.modules()):
        return [f"{TRAINING}: call model.eval() before the audit"]
    return []


def notes_of_randomness(
    loss: Callable[..., Tensor], model: nn.Module, batch: tuple[Any, ...], seed: int
) -> list[str]:
    """Returns a note if two runs of the loss differ by their random numbers, as by F.dropout(x)."""
    try:
        found = []
        for number in range(2):
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(seed + number)
                found.append(loss(model, *batch).double())
    except Exception:  # it comes again in the audit, and is reported there
        return []
    first, second = found
    if first.shape != second.shape or torch.allclose(first, second, 1e-4, 1e-6, equal_nan=True):
        return []
    return [
        "the losses are random, though no module has dropout on: F.dropout needs training=self.training, and "
        "other noise belongs into training alone"
    ]


def refuse_divided_loss(
    loss: Callable[..., Tensor], model: nn.Module, batch: tuple[Any, ...], count: int
) -> None:
    """Raises an error if the losses of samples halve when the batch doubles: they are divided by its size.

    Any error of the loss itself comes again in the audit, and is reported there.
    """
    half = count // 2
    if half < 1:
        return
    part = _part(batch, half, count)
    if part is None:
        return
    try:
        with torch.no_grad():
            whole = loss(model, *batch)[:half].double()
            alone = loss(model, *part).double()
    except Exception:
        return
    if whole.shape != (half,) or alone.shape != (half,):
        return
    size = float(whole.abs().max())
    if not size > 0 or not torch.isfinite(whole).all() or not torch.isfinite(alone).all():
        return
    same = float((alone - whole).abs().max()) <= _CLOSE * size
    scaled = float((alone - whole * (count / half)).abs().max()) <= _CLOSE * size
    if scaled and not same:
        raise AuditError(
            f"spec.loss is divided by the size of the batch: a sample's loss in a batch of {count} is "
            f"{half}/{count} of that in a batch of {half}; return the loss of each sample"
        )


def _part(batch: Any, half: int, count: int) -> Any:
    """Returns the first samples of a batch; None if it holds anything without a row for each sample."""
    if isinstance(batch, Tensor):
        return batch[:half] if batch.dim() and len(batch) == count else None
    if isinstance(batch, dict):
        parts = {name: _part(value, half, count) for name, value in batch.items()}
        return None if any(value is None for value in parts.values()) else parts
    if type(batch) in (tuple, list):
        found = [_part(value, half, count) for value in batch]
        return None if any(value is None for value in found) else type(batch)(found)
    return None
