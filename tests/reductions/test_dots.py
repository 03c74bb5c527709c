"""Inner products with a direction, against those of the gradients themselves."""

import pytest
import torch
from torch import Tensor

from pergrad.factors import Factor
from pergrad.reductions.dots import dots
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    BOUNDS,
    CASES,
    N,
    cast,
    data,
    dense_of,
    factors_of,
    with_bad_sample,
)


def direction_of(factors: list[Factor]) -> Tensor:
    return data(*factors[0].shape[1:], seed=9)


def expected(factors: list[Factor], direction: Tensor) -> Tensor:
    return (dense_of(factors) * direction.double()).view(N, -1).sum(1)


@pytest.mark.parametrize("name", CASES)
def test_dots_are_those_of_the_gradients(name: str) -> None:
    direction = direction_of(CASES[name]())
    for bound in BOUNDS:
        for factors in (factors_of(name), CASES[name]()):
            found = dots(factors, direction, bound)
            assert found.dtype == torch.float64
            assert_near(found, expected(factors, direction), f"in {bound} bytes")


@pytest.mark.parametrize("name", CASES)
def test_direction_is_not_rounded_to_the_type_of_the_factors(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        direction = direction_of(factors) * 1e5  # more than float16 has
        exact = expected(factors, direction)
        found = dots(factors, direction, 300)
        scale = dense_of(factors).norm() * direction.norm()
        assert (found - exact).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("name", CASES)
def test_a_sample_that_is_not_finite_touches_no_other(name: str) -> None:
    direction = direction_of(CASES[name]())
    plain = dots(CASES[name](), direction, 300)
    others = torch.tensor([0, 2, 3])
    for value in (float("nan"), float("inf")):
        found = dots(with_bad_sample(CASES[name](), 1, value), direction, 300)
        torch.testing.assert_close(found[others], plain[others], rtol=1e-12, atol=1e-12)


def test_direction_may_lie_anyhow_in_memory() -> None:
    for name in ("two positions", "rows", "2d", "matrix by element"):
        factors = CASES[name]()
        direction = direction_of(factors)
        strided = direction.transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()
        assert_near(dots(factors, strided, 300), expected(factors, direction), name)
