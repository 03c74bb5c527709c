"""Saves the states of a model's checkpoints in the index, so that it can be queried later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from pergrad.errors import IndexingError
from pergrad.index.store.saved import save_whole

__all__ = ["read_state", "write_states"]


def write_states(folder: Path, models: Sequence[nn.Module], fingerprints: Sequence[str]) -> None:
    """Writes a state dict for each model, named after its fingerprint; those that are there stay."""
    states = folder / "states"
    states.mkdir(exist_ok=True)
    for model, fingerprint in zip(models, fingerprints, strict=True):
        path = states / f"{fingerprint}.pt"
        if not path.exists():
            save_whole(model.state_dict(), path)


def read_state(folder: Path, fingerprint: str) -> dict[str, torch.Tensor] | None:
    """Returns a state dict, or None if the index was built without states."""
    path = folder / "states" / f"{fingerprint}.pt"
    if not path.exists():
        return None
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise IndexingError(f"{path} is corrupt ({type(error).__name__}: {error})") from error
