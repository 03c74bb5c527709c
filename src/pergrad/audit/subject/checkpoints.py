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

_STATES = ("state_dict", "model_state_dict", "model")  # of checkpoints that hold more


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
    where = f"checkpoint {number}"
    if isinstance(checkpoint, nn.Module):
        _refuse_other_shapes(model, checkpoint, where)
        return checkpoint
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
    inner = [name for name in _STATES if isinstance(checkpoint.get(name), Mapping)]
    if inner and inner[0] not in model.state_dict():
        raise AuditError(
            f"{where} holds more than a state dict ({', '.join(map(str, checkpoint))}): pass "
            f"torch.load(...)[{inner[0]!r}]"
        )
    made = copy.deepcopy(model)
    try:
        made.load_state_dict(dict(checkpoint))
    except (RuntimeError, TypeError, AttributeError) as error:
        words = " ".join(str(error).split())
        raise AuditError(f"{where} does not fit the model: {words}") from error
    return made


def _refuse_other_shapes(model: nn.Module, checkpoint: nn.Module, where: str) -> None:
    own = {name: tuple(p.shape) for name, p in checkpoint.named_parameters()}
    if list(own.values()) == [tuple(p.shape) for p in model.parameters()]:
        return  # a wrapper may have given them other names
    for name, parameter in model.named_parameters():
        if own.get(name) != tuple(parameter.shape):
            got = f"has the shape {own[name]}" if name in own else "is missing"
            raise AuditError(
                f"{where} does not fit the model: parameter {name!r} {got}, that of the model is "
                f"{tuple(parameter.shape)}"
            )
