"""Correlated noise is that of a matrix with unit columns, and hides partial sums better."""

from __future__ import annotations

import pytest
import torch

from pergrad.private import Plan
from pergrad.private.drawing.streams import Streams
from pergrad.private.planning.banded import coefficients, error_of
from pergrad.private.stepping.noise import Noise


@pytest.mark.parametrize(("bands", "steps"), [(2, 20), (8, 100), (32, 500)])
def test_columns_have_unit_norm_and_the_error_is_below_that_of_independent_noise(
    bands: int, steps: int
) -> None:
    found = coefficients(bands, steps)
    assert len(found) == bands
    assert sum(c * c for c in found) == pytest.approx(1.0)
    assert error_of(found, steps) < error_of((1.0,), steps)
    root = [1.0]
    for k in range(1, bands):
        root.append(root[-1] * (2 * k - 1) / (2 * k))
    norm = sum(c * c for c in root) ** 0.5
    assert error_of(found, steps) <= error_of(tuple(c / norm for c in root), steps) + 1e-9


def test_the_error_is_that_of_the_dense_matrix() -> None:
    steps, found = 12, coefficients(3, 12)
    c = torch.zeros(steps, steps, dtype=torch.float64)
    for k, value in enumerate(found):
        c += torch.diag(torch.full((steps - k,), value, dtype=torch.float64), -k)
    a = torch.ones(steps, steps, dtype=torch.float64).tril()
    expected = (a @ c.inverse()).square().sum().div(steps).sqrt()
    assert error_of(found, steps) == pytest.approx(float(expected))


def test_noise_of_steps_is_a_row_of_the_inverse() -> None:
    steps, plan = 7, Plan(noise_multiplier=1.0, sample_rate=0.1, steps=7, max_norm=1.0, bands=3)
    streams = Streams(b"k" * 32)
    noise = Noise(plan, streams)
    like = {"w": torch.zeros(5, dtype=torch.float64)}
    found = []
    for k in range(steps):
        found.append(noise.added(like, k, 2.0)["w"])
        assert torch.equal(found[-1], noise.added(like, k, 2.0)["w"])  # until it is committed
        noise.commit()
    c = torch.zeros(steps, steps, dtype=torch.float64)
    for k, value in enumerate(coefficients(3, steps)):
        c += torch.diag(torch.full((steps - k,), value, dtype=torch.float64), -k)
    fresh = torch.stack([streams("noise", k).normals(like["w"]) for k in range(steps)])
    torch.testing.assert_close(torch.stack(found), 2 * c.inverse() @ fresh)


def test_the_account_counts_a_record_once_in_every_b_steps() -> None:
    options = {"noise_multiplier": 1.0, "max_norm": 1.0}
    banded = Plan(sample_rate=0.01, steps=400, bands=4, **options)
    plain = Plan(sample_rate=0.04, steps=100, **options)
    assert banded.epsilon(1e-5) == plain.epsilon(1e-5)
    assert banded.epsilon(1e-5, steps=5) == plain.epsilon(1e-5, steps=2)
