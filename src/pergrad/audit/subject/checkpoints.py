"""Loads earlier states of a model from state dicts, files or modules."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pergrad.audit.subject.dtypes import Dtype, placed
from pergrad.audit.subject.spec import Spec
from pergrad.errors import AuditError

__all__ = ["checkpoint_modules", "loaded_checkpoints"]


def loaded_checkpoints(spec: Spec, device: torch.device, dtype: Dtype | None) -> list[nn.Module]:
    """Returns a copy of the model for each checkpoint of the spec, with its state."""
    return checkpoint_modules(spec.model, spec.checkpoints, device, dtype)


def checkpoint_modules(
    model: nn.Module, checkpoints: Sequence[Any], device: torch.device, dtype: Dtype | None
) -> list[nn.Module]:
    """Returns a copy of the model for each checkpoint, with its state."""
    return [
        placed(_module(model, checkpoint, number), device, dtype)
        for number, checkpoint in enumerate(checkpoints)
    ]


def _module(model: nn.Module, checkpoint: Any, number: int) -> nn.Module:
    if isinstance(checkpoint, nn.Module):
        return checkpoint
    where = f"checkpoint {number}"
    if isinstance(checkpoint, str | Path):
        where = f"checkpoint {checkpoint}"
        try:
            checkpoint = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            raise AuditError(f"cannot load {where}: {type(error).__name__}: {error}") from error
    if not isinstance(checkpoint, Mapping):
        raise AuditError(
            f"{where} must be a state dict, a file with one or a module, got {type(checkpoint).__name__}"
        )
    made = copy.deepcopy(model)
    try:
        made.load_state_dict(dict(checkpoint))
    except (RuntimeError, TypeError, AttributeError) as error:
        raise AuditError(f"{where} does not fit the model: {error}") from error
    return made
