"""Saves a run into one file, which is complete or as it was before; sharded models are saved whole."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import numbers
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
        _check_groups(optimizer, states["optimizer"])
        try:
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
        except (RuntimeError, ValueError) as error:
            told = " ".join(f"{error}".split())
            raise PrivacyError(
                f"the model or the optimizer is not the one that was saved: {told}"
            ) from error
        _restore_types(optimizer, states["optimizer"])
        return
    dcp, options = _whole()
    dcp.set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )


def _check_groups(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuses the state of another kind of optimizer, which torch loads, to fail at the next step."""
    for saved in state["param_groups"]:
        missing = sorted({*optimizer.defaults} - {*saved})
        if missing:
            raise PrivacyError(
                f"the optimizer is not the one that was saved, whose groups have no {', '.join(missing)}: "
                f"resume with the same one, not with {type(optimizer).__name__}"
            )


def _restore_types(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undoes that torch casts an optimizer's state to the type of the parameter, such as NAdam's product."""
    places = [place for group in state["param_groups"] for place in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, p in zip(places, parameters, strict=True):
        for name, saved in state["state"].get(place, {}).items():
            mine = optimizer.state[p].get(name)
            if isinstance(saved, Tensor) and isinstance(mine, Tensor) and mine.dtype != saved.dtype:
                optimizer.state[p][name] = saved.to(mine.device)


def _whole() -> tuple[Any, Any]:
    dcp = importlib.import_module("torch.distributed.checkpoint.state_dict")
    return dcp, dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)


def write(path: str | os.PathLike[str], states: Mapping[str, Any]) -> None:
    """Writes states to a file for its owner alone; a crash or a full disk leaves the file of before."""
    target = Path(os.path.realpath(path))  # a link stays one
    if not target.parent.is_dir() or (target.exists() and not target.is_file()):
        raise PrivacyError(
            f"the checkpoint {path} cannot be a file there: make its folder, or choose another path"
        )
    buffer = io.BytesIO()
    torch.save(_plain(dict(states)), buffer)
    buffer.seek(0)
    unread = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unread:
        raise PrivacyError(
            f"the state holds objects that a checkpoint does not give back ({', '.join(unread)}): keep "
            "tensors, numbers, strings and containers of them in what is saved"
        )
    beside = target.with_name(f"{target.name}.partial")
    try:
        with beside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise PrivacyError(
            f"the checkpoint {path} cannot be written ({error.strerror or error}), and is as it was before: "
            "free space or permit writing, and save again"
        ) from error
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _plain(state: Any) -> Any:
    """Returns a state with NumPy's numbers as Python's own; the very same one where there are none."""
    if isinstance(state, numbers.Number):
        return state.item() if hasattr(state, "item") else state
    if isinstance(state, dict):
        changed = {k: new for k, value in state.items() if (new := _plain(value)) is not value}
        if changed:
            state = copy.copy(state)  # keeps what a model's state has beside its items
            state.update(changed)
    elif type(state) in (list, tuple):
        found = [_plain(value) for value in state]
        if any(new is not value for new, value in zip(found, state, strict=True)):
            return type(state)(found)
    return state


def read(path: str | os.PathLike[str], names: set[str], device: torch.device) -> Mapping[str, Any]:
    """Reads states that `write` has written."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise PrivacyError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}): pass the file that `save` "
            "has written"
        ) from error
    try:
        states = torch.load(path, map_location=device, weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        EOFError,
        LookupError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise PrivacyError(
            f"{path} is not a checkpoint of a private run, or a part of it is missing: pass the file that "
            "`save` has written"
        ) from error
    if not isinstance(states, Mapping) or states.keys() != names:
        has = sorted(states) if isinstance(states, Mapping) else type(states).__name__
        raise PrivacyError(f"{path} holds {has}, expected {sorted(names)}")
    return states
