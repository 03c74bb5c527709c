"""Elementwise sums of squares over the samples, against those of the gradients themselves."""

from math import prod

import pytest
import torch
from torch import Tensor

from pergrad.factors import Dense, Factor, joined
from pergrad.reductions.moments import squares_about, sum_of_squares
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    BOUNDS,
    CASES,
    N,
    cast,
    convolution,
    data,
    dense_of,
    factors_of,
    outer,
    rows,
)
from tests.reductions.memory import largest_tensor

SCALES = [None, torch.tensor([0.5, -2.0, 0.0, 3.0], dtype=torch.float64)]


@pytest.mark.parametrize("scale", SCALES, ids=["plain", "scaled"])
@pytest.mark.parametrize("name", CASES)
def test_sum_of_squares_is_that_of_the_gradients(name: str, scale: Tensor | None) -> None:
    gradients = dense_of(CASES[name]())
    if scale is not None:
        gradients = gradients * scale.view(-1, *[1] * (gradients.dim() - 1))
    center = data(*gradients.shape[1:], seed=9)
    for bound in BOUNDS:
        found = sum_of_squares(factors_of(name), scale, bound)
        assert_near(found, gradients.square().sum(0), f"in {bound} bytes")
        found = squares_about(center, factors_of(name), scale, bound)
        assert_near(found, (gradients - center).square().sum(0), "about a centre")


@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_multiplied_and_summed_in_float32(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        exact = dense_of(factors).square().sum(0)
        found = sum_of_squares(joined(factors), None, 300)
        assert found.dtype == torch.float32
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_squares_about_the_mean_survive_a_mean_that_outweighs_them() -> None:
    gradients = (1e4 + data(N, 6, 5) * 0.1).float()
    mean = gradients.double().mean(0)
    exact = (gradients.double() - mean).square().sum(0)
    found = squares_about(mean.float(), [Dense(gradients)], None, 300)
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "factor",
    [
        outer(8, 1, 16, 16),
        outer(8, 3, 16, 16),
        rows(8, 3, 64, 8),
        convolution(8, (6,), (3,), outputs=60),
    ],
    ids=["one position", "positions", "rows", "convolution"],
)
def test_no_intermediate_but_the_result_exceeds_the_bound(factor: Factor) -> None:
    bound = 4_000
    result = 8 * prod(factor.shape[1:])
    assert largest_tensor(factor.materialize) > 2 * max(bound, result)
    assert largest_tensor(lambda: sum_of_squares([factor], None, bound)) <= max(bound, result)
