"""Trains the models of the benchmark to three states: undertrained, well trained, memorised."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["STATES", "Trained", "cross_validated", "trained"]

STATES = ("undertrained", "well trained", "memorised")
_STEPS = {"undertrained": 60, "well trained": 400}
_EPOCHS_TO_MEMORISE = 400
_MEMORISED = 0.01  # mean loss
_BATCH = 64
_CHECKPOINTS = 5


@dataclass(frozen=True)
class Trained:
    """A model at one state, and the checkpoints on the way, evenly spaced, the model itself last."""

    model: nn.Module
    checkpoints: list[nn.Module]


def trained(
    network: Callable[[], nn.Module], x: Tensor, y: Tensor, seed: int
) -> dict[str, Trained]:
    """Trains once and keeps the model at each state."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    kept: dict[int, nn.Module] = {}
    found: dict[str, Trained] = {}
    step = 0
    marks = _marks(list(_STEPS.values()))
    while True:
        total = 0.0
        for rows in torch.randperm(len(y)).split(_BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
            step += 1
            if step in marks or step % 100 == 0:
                kept[step] = copy.deepcopy(model)
            for state, steps in _STEPS.items():
                if step == steps:
                    found[state] = _at(kept, step)
        epochs = step * _BATCH / len(y)
        is_done = total / len(y) < _MEMORISED or epochs > _EPOCHS_TO_MEMORISE
        if step > max(_STEPS.values()) and is_done:
            kept[step] = copy.deepcopy(model)
            found["memorised"] = _at(kept, step)
            return found


def _marks(ends: list[int]) -> set[int]:
    return {end * n // _CHECKPOINTS for end in ends for n in range(1, _CHECKPOINTS + 1)}


def _at(kept: dict[int, nn.Module], last: int) -> Trained:
    wanted = [last * n / _CHECKPOINTS for n in range(1, _CHECKPOINTS + 1)]
    chosen = [min(kept, key=lambda step: abs(step - goal)) for goal in wanted]
    return Trained(kept[last], [kept[step] for step in chosen])


def cross_validated(
    network: Callable[[], nn.Module], x: Tensor, y: Tensor, classes: int, seed: int, folds: int = 5
) -> dict[str, np.ndarray]:
    """Returns the probabilities of held-out samples, (n, classes), at each state."""
    found = {state: np.zeros((len(y), classes)) for state in STATES}
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    for fold in range(folds):
        held_out = order[fold::folds]
        kept = torch.ones(len(y), dtype=torch.bool)
        kept[held_out] = False
        models = trained(network, x[kept], y[kept], seed)
        for state, at in models.items():
            with torch.no_grad():
                found[state][held_out.numpy()] = at.model(x[held_out]).softmax(1).numpy()
    return found
