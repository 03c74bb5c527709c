"""Moves the model and its batches to a device and a dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pergrad.audit.subject.sharding import is_sharded_model
from pergrad.errors import AuditError

__all__ = ["Dtype", "moved", "own_dtype", "placed"]

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def own_dtype(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the floating-point parameters, or None if they differ."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def placed(model: nn.Module, device: torch.device, dtype: Dtype | None) -> nn.Module:
    """Returns the model on that device in that dtype: itself if it is already there, else a copy."""
    wanted = getattr(torch, dtype) if dtype is not None else None
    tensors = [*model.parameters(), *model.buffers()]
    if is_sharded_model(model):
        for name, p in model.named_parameters():
            if wanted is not None and p.is_floating_point() and p.dtype != wanted:
                raise AuditError(
                    f"fully_shard has sharded parameter {name!r} in {p.dtype}, and a sharded model is not "
                    f"copied to {wanted}: leave out the dtype, or cast the model before fully_shard"
                )
        return model
    is_there = all(t.device == device for t in tensors)
    has_dtype = wanted is None or all(t.dtype == wanted for t in tensors if t.is_floating_point())
    if is_there and has_dtype:
        return model
    try:
        return copy.deepcopy(model).to(device=device, dtype=wanted)
    except Exception as error:
        raise AuditError(
            f"the model cannot be copied to {device} {dtype or ''}: {type(error).__name__}: {error}"
        ) from error


def moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Returns the batch with its tensors on the device, floating-point tensors in that dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        changed = {key: moved(value, device, dtype) for key, value in batch.items()}
        if type(batch) is dict:
            return changed
        batch = copy.copy(batch)  # keeps the class and attributes, as of a BatchEncoding
        batch.update(changed)
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, dtype) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device, dtype) for value in batch)
    return batch
