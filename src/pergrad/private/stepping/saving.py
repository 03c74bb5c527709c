"""Saves a run into one file, which is complete or as it was before; sharded models are saved whole."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pergrad.distributed.sharding import reshard
from pergrad.errors import PrivacyError

__all__ = ["gathered", "loaded", "read", "write"]


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Returns the states of model and optimizer; those of sharded ones whole, on the first rank only."""
    if not reshard(model):
        return model.state_dict(), optimizer.state_dict()
    dcp, options = _whole()
    found: tuple[Any, Any] = dcp.get_state_dict(model, optimizer, options=options)
    return found


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
    """Gives whole states back to model and optimizer."""
    if not reshard(model):
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        return
    dcp, options = _whole()
    dcp.set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )


def _whole() -> tuple[Any, Any]:
    dcp = importlib.import_module("torch.distributed.checkpoint.state_dict")
    return dcp, dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def write(path: str | os.PathLike[str], states: Mapping[str, Any]) -> None:
    """Writes states to a file for its owner alone; a crash leaves the file of before."""
    buffer = io.BytesIO()
    torch.save(dict(states), buffer)
    target = Path(path)
    beside = target.with_name(f"{target.name}.partial")
    with beside.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str], names: set[str], device: torch.device) -> Mapping[str, Any]:
    """Reads states that `write` has written."""
    states = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(states, Mapping) or states.keys() != names:
        has = sorted(states) if isinstance(states, Mapping) else type(states).__name__
        raise PrivacyError(f"{path} holds {has}, expected {sorted(names)}")
    return states
