"""Adam with bias correction subtracts the known variance of the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pergrad.errors import PrivacyError
from pergrad.private import AdamBC, Adaptive
from tests.private.stepping.cases import mlp, plan, run, weights


def test_without_noise_it_is_adam() -> None:
    ends = []
    made = plan(noise_multiplier=0.0)
    for kind in ("mine", "torch"):
        model = mlp()
        optimizer: Any = (
            AdamBC(model.parameters(), made, lr=0.1, floor=1e-30)
            if kind == "mine"
            else torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0)
        )
        step, loader = run(plan(noise_multiplier=0.0), model, optimizer=optimizer)
        for batch in loader:
            step(*batch)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1])


def test_the_second_moment_loses_the_noise() -> None:
    made = plan(noise_multiplier=2.0, max_norm=1.0, expected_batch_size=8)
    p = nn.Parameter(torch.zeros(20_000, dtype=torch.float64))
    optimizer = AdamBC([p], made, lr=1.0, betas=(0.0, 0.9), floor=1e-12)
    noise = 2.0 / 8
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        before = p.detach().clone()
        p.grad = 0.5 + noise * torch.randn(p.shape, dtype=p.dtype, generator=generator)
        grad = p.grad
        optimizer.step()
    corrected = (grad / (before - p.detach())).square()
    assert corrected.median() == pytest.approx(0.25, rel=0.1)  # of the gradient alone


def test_it_is_saved_with_the_run(tmp_path: Any) -> None:
    made = plan()
    model = mlp()
    step, loader = run(made, model, optimizer=AdamBC(model.parameters(), made))
    step(*next(iter(loader)))
    step.save(tmp_path / "run.pt")
    step.load(tmp_path / "run.pt")


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"clipping": Adaptive(noise=3.0)}, {}, "an adaptive bound changes it"),
        ({"bands": 2}, {}, "needs independent noise"),
        ({"expected_batch_size": None}, {}, "expected_batch_size"),
        ({}, {"floor": 0.0}, "floor must be positive"),
        ({}, {"lr": -0.1}, "must not be negative"),
        ({}, {"weight_decay": -0.1}, "must not be negative"),
        ({}, {"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_plans_without_one_noise_are_refused(changes: Any, options: Any, reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        AdamBC(mlp().parameters(), plan(**changes), **options)
