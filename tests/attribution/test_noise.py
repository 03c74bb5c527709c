"""The noise scale: its formulas, that its estimates are unbiased, and what it says when it cannot tell."""

import math

import numpy as np
import pytest
import torch

import pergrad
from pergrad.attribution import Noise, gradient_noise
from tests.attribution.gradient_cases import gradients


def noise_of(rows: np.ndarray) -> Noise:
    return gradient_noise(np.linalg.norm(rows, axis=1), rows)


@pytest.mark.parametrize("samples", [2, 3, 19, 20, 21, 500])
def test_estimates_are_those_of_the_formulas(samples) -> None:
    rows = 2 + gradients(samples, 5)
    trace = rows.var(axis=0, ddof=1).sum()
    mean = np.square(rows.mean(axis=0)).sum() - trace / samples
    found = noise_of(rows)
    assert found.trace == pytest.approx(trace, rel=1e-9)
    assert found.squared_mean == pytest.approx(mean, rel=1e-9)
    assert found.scale == pytest.approx(trace / mean, rel=1e-9)
    assert found.critical_batch_size == max(1, round(trace / mean))


def test_estimates_agree_with_the_quantity() -> None:
    model = torch.nn.Linear(5, 1, bias=False).double()
    rows = 1 + gradients(12, 5)
    with pergrad.record(model, pergrad.NoiseScale()) as noise:
        model(torch.from_numpy(rows)).sum().backward()
    assert noise_of(rows).scale == pytest.approx(noise.result, rel=1e-9)


def test_estimates_have_no_bias() -> None:
    """Over 400 draws of 3 samples: |G|² = 4, tr(Σ) = 4, each mean within 5 of its standard errors."""
    rows = [noise_of(1 + gradients(3, 4, seed)) for seed in range(400)]
    found = np.array([[noise.trace, noise.squared_mean] for noise in rows])
    error = found.std(axis=0, ddof=1) / 20
    assert (np.abs(found.mean(axis=0) - 4) <= 5 * error).all()
    assert (error < 0.5).all()


def test_sketches_give_no_bias_either() -> None:
    """Over 300 random maps of the same 6 gradients, the mean estimate is that of the gradients themselves."""
    rows = 1 + gradients(6, 8)
    norm = np.linalg.norm(rows, axis=1)
    maps = np.random.default_rng(1).choice([-1.0, 1.0], size=(300, 8, 16)) / 4
    found = np.array([gradient_noise(norm, rows @ each).squared_mean for each in maps])
    error = found.std(ddof=1) / math.sqrt(300)
    assert abs(found.mean() - noise_of(rows).squared_mean) <= 5 * error


def test_the_interval_holds_the_true_scale_about_as_often_as_it_should() -> None:
    """True scale 64 / 16 = 4 at 64 columns, so that the sketch's own error is in it; expected about 95%."""
    held = 0
    for seed in range(200):
        rows = 0.5 + gradients(400, 64, seed)
        found = gradient_noise(np.linalg.norm(rows, axis=1), rows)
        assert found.low is not None
        assert found.low < found.scale
        held += found.low <= 4 and (found.high is None or found.high >= 4)
    assert held >= 180


def test_noise_that_outweighs_the_mean_has_no_scale() -> None:
    rows = gradients(10, 6)
    found = noise_of(rows - rows.mean(axis=0))
    assert found.squared_mean < 0
    assert (found.scale, found.high, found.critical_batch_size) == (None,) * 3


def test_noise_that_outweighs_the_mean_has_a_bound_from_below() -> None:
    """The true scale is 40 / 0.01 = 4000; 300 samples cannot tell it, but that it is over a hundred."""
    for seed in range(20):
        found = noise_of(0.1 / 40**0.5 + gradients(300, 40, seed))
        assert found.low is not None
        assert 100 < found.low < 4000


def test_a_single_sample_has_no_scale() -> None:
    found = noise_of(np.ones((1, 3)))
    assert math.isnan(found.trace)
    assert found.scale is None


def test_identical_gradients_have_no_noise() -> None:
    found = noise_of(np.ones((30, 3)))
    assert found.scale == pytest.approx(0.0, abs=1e-12)
    assert found.critical_batch_size == 1


def test_gradients_of_zero_have_no_scale() -> None:
    assert noise_of(np.zeros((30, 3))).scale is None


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_the_scale_has_no_unit(unit) -> None:
    rows = 2 + gradients(50, 5)
    norm = np.linalg.norm(rows, axis=1)
    assert gradient_noise(unit * norm, unit * rows).scale == pytest.approx(
        noise_of(rows).scale, rel=1e-9
    )
