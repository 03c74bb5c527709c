"""The model on its device and in its type, and batches that follow it there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pergrad.errors import AuditError

__all__ = ["Dtype", "moved", "own_dtype", "placed"]

Dtype = Literal["float64", "float32", "bfloat16", "float16"]


def own_dtype(model: nn.Module) -> torch.dtype | None:
    """The type of all parameters that are floating-point, or None where they differ."""
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def placed(model: nn.Module, device: torch.device, dtype: Dtype | None) -> nn.Module:
    """The model there and in that type: itself where it is so already, else a copy."""
    wanted = getattr(torch, dtype) if dtype is not None else None
    tensors = [*model.parameters(), *model.buffers()]
    is_there = all(t.device == device for t in tensors)
    is_so = wanted is None or all(t.dtype == wanted for t in tensors if t.is_floating_point())
    if is_there and is_so:
        return model
    try:
        return copy.deepcopy(model).to(device=device, dtype=wanted)
    except Exception as error:
        raise AuditError(
            f"the model cannot be copied to {device} {dtype or ''}: {type(error).__name__}: {error}"
        ) from error


def moved(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A batch with its tensors on the device, those that are floating-point in that type."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        changed = {key: moved(value, device, dtype) for key, value in batch.items()}
        if type(batch) is dict:
            return changed
        batch = copy.copy(batch)  # such as a BatchEncoding, which is more than its items
        batch.update(changed)
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device, dtype) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device, dtype) for value in batch)
    return batch
