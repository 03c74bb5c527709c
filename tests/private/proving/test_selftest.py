"""The audit finds every planted bug, and nothing in sound training."""

from __future__ import annotations

import pytest
import torch

from pergrad.errors import PrivacyError
from pergrad.private import Plan, selftest, sensitivities
from pergrad.private.proving.canaries import audited


def test_every_planted_bug_is_found_and_sound_training_passes() -> None:
    findings = [*selftest(seed=3, steps=300)]
    assert [finding.name for finding in findings if not finding.ok] == []
    assert sum(finding.planted for finding in findings) == 5
    assert sum(not finding.planted for finding in findings) == 2


def test_the_noise_of_sound_training_hides_the_canaries() -> None:
    plan = Plan(
        noise_multiplier=1.0, sample_rate=0.2, steps=20, max_norm=2.0, expected_batch_size=20
    )
    run = audited(plan, canaries=200, seed=0)
    out = run.released[:, ~run.is_in]
    assert out.std() == pytest.approx(1.0, rel=0.05)  # of multiples of the bound
    assert run.released[:, run.is_in].mean() == pytest.approx(0.2, abs=0.05)
    assert run.bound(delta=1e-5) < plan.epsilon(1e-5)


def test_sensitivities_need_samples() -> None:
    with pytest.raises(PrivacyError, match="no tensor with samples"):
        sensitivities(lambda x: {"w": x}, torch.tensor(1.0))
