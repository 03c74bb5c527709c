"""Weighted sums over the samples, against those of the gradients themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import Factor, OuterProduct
from pergrad.reductions import sums
from pergrad.reductions.sums import weighted_sum
from pergrad.reductions.weights import SampleWeights
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    CASES,
    N,
    cast,
    convolution,
    data,
    dense_of,
    factors_of,
    outer,
    with_bad_sample,
)
from tests.reductions.memory import largest_tensor

WEIGHTS = torch.tensor([0.5, -2.0, 0.25, 3.0], dtype=torch.float64)


def expected(factors: list[Factor], weights: Tensor) -> Tensor:
    return torch.tensordot(weights, dense_of(factors), 1)


@pytest.mark.parametrize("name", CASES)
def test_weighted_sum_is_that_of_the_gradients(name: str) -> None:
    for factors in (factors_of(name), CASES[name]()):
        found = weighted_sum(factors, WEIGHTS)
        assert found.dtype == torch.float64
        assert_near(found, expected(CASES[name](), WEIGHTS), name)


@pytest.mark.parametrize("name", CASES)
def test_sum_without_weights_is_that_with_ones(name: str) -> None:
    ones = torch.ones(N, dtype=torch.float64)
    assert_near(weighted_sum(factors_of(name), None), expected(CASES[name](), ones))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_not_rounded_to_the_type_of_the_factors(name: str) -> None:
    weights = WEIGHTS / 3e8  # nothing in float16
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        found = weighted_sum(factors, weights)
        assert found.dtype == torch.float32
        exact = expected(factors, weights)
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_weight_zero_adds_nothing_whatever_it_is(name: str) -> None:
    weights = WEIGHTS.clone()
    weights[1] = 0
    for value in (float("nan"), float("inf")):
        found = weighted_sum(with_bad_sample(CASES[name](), 1, value), weights)
        assert_near(found, expected(CASES[name](), weights))


@pytest.mark.parametrize("name", CASES)
def test_inputs_that_are_not_finite_add_nothing_either(name: str) -> None:
    factors = CASES[name]()
    for factor in factors:
        if isinstance(getattr(factor, "input", None), Tensor):
            factor.input[1] = float("nan")
    weights = WEIGHTS.clone()
    weights[1] = 0
    assert_near(weighted_sum(factors, weights), expected(CASES[name](), weights))


def test_all_samples_of_weight_zero_sum_to_zero() -> None:
    for name in CASES:
        assert not weighted_sum(factors_of(name), torch.zeros(N)).any()


@pytest.mark.parametrize(
    "factor", [outer(32, 2, 20, 30), convolution(32, (4,), (3,), channels=16, outputs=40)]
)
def test_no_gradient_of_each_sample_is_made(factor: Factor) -> None:
    largest = largest_tensor(lambda: weighted_sum([factor], data(32)))
    assert largest < largest_tensor(factor.materialize) / 4


def test_widths_that_a_kernel_pads_are_cut_from_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(x: Tensor, scale: SampleWeights | None) -> Tensor:
        return F.pad(x if scale is None else x * scale.over(x), (0, -x.shape[-1] % 8))

    for name in ("_scaled", "_without_dropped"):
        monkeypatch.setattr(sums, name, padded)
    for o, i in ((3, 5), (8, 5), (3, 8), (8, 8)):
        factor = OuterProduct(torch.randn(4, 6, o), torch.randn(4, 6, i))
        weights = SampleWeights(torch.ones(4))
        found = sums.weighted_sum_of(factor, weights, torch.float32)
        torch.testing.assert_close(found, factor.materialize().sum(0))
