"""Noise has its deviation in every real number, and is never shared by two sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.discrete import DEVIATION
from pergrad.private.drawing.streams import Streams
from pergrad.private.stepping.noise import Noise
from tests.private.stepping.cases import plan


def noise(cryptographic: bool = False, **changes: Any) -> Noise:
    return Noise(plan(**changes), Streams(bytes(32), cryptographic=cryptographic))


@pytest.mark.parametrize("kind", ["gaussian", "discrete"])
@pytest.mark.parametrize("cryptographic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_every_real_number_gets_the_deviation(
    dtype: torch.dtype, cryptographic: bool, kind: str
) -> None:
    sums = {"w": torch.zeros(100, 100, dtype=dtype)}
    found = noise(cryptographic, noise=kind).added(sums, 3, 0.5)["w"]
    assert found.dtype == dtype
    reals = torch.view_as_real(found) if dtype.is_complex else found[..., None]
    for part in reals.unbind(-1):
        values = (part.double() / 0.5).flatten()
        assert values.std().item() == pytest.approx(1, abs=0.036)
        assert stats.kstest(values.numpy(), "norm").pvalue > 1e-4


def test_parameters_steps_and_runs_have_noise_of_their_own() -> None:
    sums = {"a": torch.zeros(20_000), "b": torch.zeros(20_000)}
    made = noise()
    drawn = [made.added(sums, number, 1.0, run) for number in (0, 1) for run in ("x", "y")]
    rows = torch.stack([t for found in drawn for t in found.values()])
    assert (torch.corrcoef(rows) - torch.eye(8)).abs().max() < 0.035  # five deviations
    again = made.added(sums, 1, 1.0, "y")
    assert torch.equal(again["a"], drawn[-1]["a"])


def test_discrete_noise_is_on_a_grid_that_covers_its_rounding() -> None:
    sums = {"w": torch.randn(1000, dtype=torch.float64), "v": torch.randn(24, dtype=torch.float64)}
    found = noise(noise="discrete", noise_multiplier=2.0).added(sums, 0, 2.0 * 0.5)
    bound = DEVIATION / 2.0 - 1.001 * math.sqrt(1024)  # in steps of the grid
    step = 0.5 / bound
    for t in found.values():
        assert (t / step - (t / step).round()).abs().max() < 1e-6
    # Rounding moves neighbours apart by √d steps at most; the noise has DEVIATION steps.
    assert DEVIATION / (bound + math.sqrt(1024)) >= 2.0


def test_too_many_numbers_for_the_grid_are_refused() -> None:
    sums: dict[str, Tensor] = {"w": torch.zeros(()).expand(100_000, 10_000, 10_000)}
    with pytest.raises(PrivacyError, match="too many for a grid"):
        noise(noise="discrete", noise_multiplier=10.0).added(sums, 0, 0.5)
