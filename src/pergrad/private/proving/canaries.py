"""Trains on canaries whose gradients are orthogonal, and scores each of them: the strongest one-run audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pergrad.private.planning.plan import Plan
from pergrad.private.proving.one_run import one_run_audit
from pergrad.private.stepping.step import Step

__all__ = ["Canaries", "audited"]

MakeStep = Callable[..., Step]
_STEEP = 10.0  # the gradient's norm as a multiple of the bound: every canary is clipped


@dataclass(frozen=True)
class Canaries:
    """One run with canaries: which of them were in, and the noisy sums of all steps in their directions."""

    is_in: Tensor  # (m,)
    released: Tensor  # (steps, m), as multiples of the bound
    place: Tensor  # (m,): the position in the data of those that were in; -1 for the others
    rate: float  # of the plan

    def bound(
        self, *, delta: float, slots: Tensor | None = None, significance: float = 0.05
    ) -> float:
        """Returns a lower bound on epsilon.

        slots: (m,), the batch of each pass that has the canary, where the attacker knows it.
        """
        if slots is None:
            scores = self._likelihoods()
        else:
            period = int(slots.max()) + 1
            used = torch.arange(len(self.released))[:, None] % period == slots
            scores = (self.released * used).sum(0)
        return one_run_audit(
            scores[self.is_in], scores[~self.is_in], delta=delta, significance=significance
        )

    def _likelihoods(self) -> Tensor:
        """Returns Σ_t log(1 - q + q exp((u - ½) / s²)): the best score for an attacker who sees all steps.

        s is estimated from what was released, as it may be less than the account says.
        """
        noise = max(float(self.released.abs().median()) / 0.6745, 1e-2)
        gain = (self.released.double() - 0.5) / noise**2
        rate = torch.tensor(self.rate, dtype=torch.float64)
        return torch.logaddexp((1 - rate).log(), rate.log() + gain).sum(0)


class _Recorded(torch.optim.SGD):
    """An optimizer that keeps the gradients that it is given: what every step releases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.released: list[Tensor] = []

    def step(self, closure: Any = None) -> Any:
        (p,) = self.param_groups[0]["params"]
        self.released.append(-p.grad.flatten().clone())
        return super().step(closure)


def audited(plan: Plan, *, canaries: int, seed: int, make_step: MakeStep = Step) -> Canaries:
    """Trains on the canaries that a fair coin puts in; canary k has a gradient in direction k only."""
    coins = torch.Generator().manual_seed(seed)
    is_in = torch.rand(canaries, generator=coins) < 0.5
    place = torch.where(is_in, is_in.cumsum(0) - 1, -1)
    model = nn.Embedding.from_pretrained(torch.zeros(canaries, 1), freeze=False)
    optimizer = _Recorded(model.parameters(), lr=1.0)
    loader = plan.loader(
        TensorDataset(is_in.nonzero()[:, 0]), torch.Generator().manual_seed(seed + 1)
    )
    step = make_step(
        model,
        optimizer,
        _pull,
        plan,
        certify=False,
        generator=torch.Generator().manual_seed(seed + 2),
    )
    for (batch,) in loader:
        step(batch)
    assert plan.expected_batch_size is not None
    scale = plan.expected_batch_size / plan.sensitivity
    return Canaries(is_in, torch.stack(optimizer.released) * scale, place, plan.sample_rate)


def _pull(model: nn.Module, canary: Tensor) -> Tensor:
    return -_STEEP * model(canary[:, None])[:, 0, 0]
