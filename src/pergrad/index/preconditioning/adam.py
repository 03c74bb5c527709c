"""Preconditions gradients as Adam does: divided by the root of the optimizer's second moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import Damping, OnGradients

__all__ = ["Adam", "adam_state"]


def adam_state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Returns √v̂ + ε of each parameter, from an optimizer of the model with Adam's state.

    v̂ is the second moment with its bias corrected; of amsgrad, its maximum.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise IndexingError(
            "preconditioner='adam' needs the optimizer that trained the model: pass optimizer=, got "
            f"{type(optimizer).__name__}"
        )
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if id(p) not in names or "exp_avg_sq" not in state:
                continue
            square = state.get("max_exp_avg_sq", state["exp_avg_sq"]).detach().double().cpu()
            steps = float(state.get("step", 0))
            corrected = square / (1 - group["betas"][1] ** steps) if steps else square
            found[names[id(p)]] = corrected.sqrt() + group.get("eps", 1e-8)
    missing = [
        name for name, p in model.named_parameters() if p.requires_grad and name not in found
    ]
    if missing:
        raise IndexingError(
            f"the optimizer ({type(optimizer).__name__}) has no second moment of parameter {missing[0]!r}: "
            f"pass "
            "the Adam that trained this model, after at least one step"
        )
    return found


class Adam(OnGradients):
    """g / (√v̂ + ε + λ), with λ = damping · mean of the divisor of that parameter.

    >>> adam = Adam({"w": torch.tensor([1.0, 4.0])}, Damping(0.0))
    >>> adam.applied({"w": torch.tensor([[2.0, 2.0]])})["w"]
    tensor([[2.0000, 0.5000]])
    """

    def __init__(self, divisors: Mapping[str, Tensor], damping: Damping) -> None:
        self._divisors = {
            name: divisor + damping.of(float(divisor.mean())) for name, divisor in divisors.items()
        }

    def applied(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: g / self._divisors[name].to(g) for name, g in gradients.items()}
