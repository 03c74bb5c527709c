"""Losses that change with the number of samples in a batch are refused, all others are taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pergrad.errors import PrivacyError
from tests.private.stepping.cases import data, losses, mlp, plan, run


class Counting(nn.Module):
    """Uses the number of its rows."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.inner, self.factor = mlp(), factor

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x) * self.factor(len(x))
        return logits


@pytest.mark.parametrize(
    "factor", [lambda n: 1 / n, lambda n: float(n), lambda n: math.sqrt(1 / n)]
)
def test_a_loss_or_a_model_that_counts_samples_is_refused(factor: Any) -> None:
    def counting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x, y) * factor(len(x))

    for model, loss_fn in ((mlp(), counting), (Counting(factor), losses)):
        step, loader = run(plan(sample_rate=0.4, expected_batch_size=16), model, loss_fn)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(
            PrivacyError, match="change with the size of the batch, which is private"
        ):
            step(*next(iter(loader)))
        assert all(map(torch.equal, before, model.parameters()))


def test_a_division_by_a_sum_of_ones_is_refused() -> None:
    def averaged(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x, y) / torch.ones_like(y).sum()

    step, loader = run(plan(), mlp(), averaged)
    with pytest.raises(PrivacyError, match="change with the size of the batch"):
        step(*next(iter(loader)))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.AlphaDropout(0.5)])
def test_random_numbers_are_no_reason_to_refuse(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), dropout, nn.Linear(8, 3)).double()
    step, loader = run(plan(), model)
    for batch in loader:
        step(*batch)
    assert step.is_certified
    assert model.training
    assert dropout.training


def test_a_model_that_draws_in_eval_mode_is_taken() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x + 0.1 * torch.randn_like(x))
            return logits

    step, loader = run(plan(), Noisy())
    for batch in loader:
        step(*batch)


def test_half_precision_and_zero_losses_are_no_reason_to_refuse() -> None:
    def hinge(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(losses(model, x, y) - 1.2)

    step, loader = run(
        plan(sample_rate=0.5, expected_batch_size=20),
        mlp(torch.float32),
        hinge,
        data(dtype=torch.float32),
    )
    for batch in loader:
        with torch.autocast("cpu", torch.bfloat16):
            step(*batch)
    assert step.is_certified
