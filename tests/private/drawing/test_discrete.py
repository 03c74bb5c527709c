"""The discrete Gaussian is drawn with the right probabilities, and has the account of the continuous one."""

from __future__ import annotations

import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from pergrad.private.drawing import discrete
from pergrad.private.drawing.discrete import DEVIATION, discrete_normals
from pergrad.private.drawing.streams import Streams


@pytest.mark.parametrize("cryptographic", [False, True])
@pytest.mark.parametrize("deviation", [1, 3])
def test_integers_have_the_probabilities_of_the_formula(
    deviation: int, cryptographic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discrete, "DEVIATION", deviation)
    streams = Streams(bytes(32), cryptographic=cryptographic)
    drawn = discrete_normals(streams("test"), 100_000)
    values = torch.arange(-3 * deviation, 3 * deviation + 1)
    chances = torch.exp(-values.double().square() / (2 * deviation**2))
    far = torch.arange(3 * deviation + 1, 40 * deviation).double()
    tail = torch.exp(-far.square() / (2 * deviation**2)).sum()
    chances = torch.cat([tail[None], chances, tail[None]])
    seen = torch.stack([(drawn == v).sum() for v in values])
    outside = torch.stack([(drawn < values[0]).sum(), (drawn > values[-1]).sum()])
    counts = torch.cat([outside[:1], seen, outside[1:]]).double()
    expected = chances / chances.sum() * len(drawn)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_noise_of_many_steps_is_gaussian() -> None:
    drawn = discrete_normals(Streams(bytes(32))("test"), 200_000)
    assert drawn.dtype == torch.int64
    assert stats.kstest((drawn.double() / DEVIATION).numpy(), "norm").pvalue > 1e-3
    assert len(discrete_normals(Streams(bytes(32))("test"), 0)) == 0


def test_the_account_of_the_continuous_gaussian_holds_for_the_discrete_one() -> None:
    steps = 200  # of the grid in one sensitivity; a run has 2²⁴ over its noise multiplier
    fine = {"sampling_prob": 0.05, "value_discretization_interval": 1e-5}
    discrete_one = pld.from_discrete_gaussian_mechanism(1.0 * steps, sensitivity=steps, **fine)
    continuous = pld.from_gaussian_mechanism(1.0, **fine)
    found, expected = (
        p.self_compose(10).get_epsilon_for_delta(1e-5) for p in (discrete_one, continuous)
    )
    assert found == pytest.approx(expected, abs=2e-4)  # half of the interval, ten times, and more
