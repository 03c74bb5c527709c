"""Defines `AdamBC`: Adam whose second moment is corrected for the noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.planning.adaptive import Adaptive
from pergrad.private.planning.plan import Plan

__all__ = ["AdamBC"]


class AdamBC(torch.optim.Optimizer):
    """m̂ / √max(v̂ - s², floor), where s is the noise in each number of the gradient.

    The squares that Adam averages have the variance of the noise on top of those of the gradient; where
    noise dominates, Adam is SGD with momentum. Subtracting the noise's known variance restores Adam
    (DP-AdamBC: Tang, Shpilevskiy and Lécuyer, 2023). The plan is public, so this costs no privacy.

    Args:
        params: as for any optimizer.
        plan: the plan of the step, which tells the noise; its bound must be fixed.
        lr: the learning rate.
        betas: decay of the two moments.
        floor: the least corrected second moment: steps are at most lr · |m̂| / √floor.
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        plan: Plan,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if isinstance(plan.clipping, Adaptive):
            raise PrivacyError(
                "AdamBC needs the same noise in all steps, but an adaptive bound changes it: use a fixed "
                "max_norm, or torch.optim.Adam"
            )
        if plan.bands > 1:
            raise PrivacyError(
                "AdamBC needs independent noise: correlated noise has no one variance"
            )
        if plan.expected_batch_size is None:
            raise PrivacyError("AdamBC needs the plan's expected_batch_size")
        if not floor > 0:
            raise PrivacyError(f"floor must be positive, got {floor!r}")
        if not lr >= 0 or not weight_decay >= 0:
            raise PrivacyError(
                f"lr and weight_decay must not be negative, got {lr!r} and {weight_decay!r}"
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise PrivacyError(f"betas must be two numbers in [0, 1), got {betas!r}")
        deviation = plan.gradient_noise_multiplier * plan.sensitivity / plan.expected_batch_size
        self._variance = deviation**2
        defaults = {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
        first, second = group["betas"]
        state["step"] += 1
        count = int(state["step"])
        mean = state["mean"].lerp_(grad, 1 - first) / (1 - first**count)
        square = state["square"].lerp_(grad.square(), 1 - second) / (1 - second**count)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * mean / (square - self._variance).clamp(min=group["floor"]).sqrt())
