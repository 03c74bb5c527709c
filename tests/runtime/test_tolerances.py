"""Tolerances grow as dtypes get coarser, and errors are relative to the largest element."""

import math

import pytest
import torch

from pergrad.runtime.tolerances import (
    largest,
    largest_difference,
    largest_of_each,
    noise_floor,
    relative_error,
    tolerance_of_model,
    tolerance_of_rerun,
    tolerance_of_rule,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]  # the finest first


@pytest.mark.parametrize("tolerance", [tolerance_of_rule, tolerance_of_model, tolerance_of_rerun])
def test_coarser_dtypes_are_allowed_larger_errors(tolerance) -> None:
    found = [tolerance(dtype) for dtype in DTYPES]
    assert found == sorted(set(found))
    assert all(tolerance(dtype) > torch.finfo(dtype).eps for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_are_allowed_larger_errors_than_rules(dtype: torch.dtype) -> None:
    assert tolerance_of_model(dtype) > tolerance_of_rule(dtype)


def test_the_coarsest_of_several_dtypes_counts() -> None:
    both = tolerance_of_model(torch.float32, torch.bfloat16)
    assert both == tolerance_of_model(torch.bfloat16)


def test_error_is_relative_to_the_largest_element() -> None:
    expected = torch.tensor([100.0, 1.0])
    assert relative_error(expected + torch.tensor([0.0, 1.0]), expected, 0.0) == 0.01


def test_what_is_below_the_floor_is_noise() -> None:
    assert relative_error(torch.tensor([2.0]), torch.tensor([1.0]), 50.0) == 0.02


def test_error_of_what_is_not_a_number_is_none_either() -> None:
    nan = torch.tensor([math.nan])
    assert math.isnan(relative_error(nan, torch.ones(1), 0.0))


@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_zeros_and_nothing_are_without_error(shape: tuple[int, ...]) -> None:
    zeros = torch.zeros(shape)
    assert relative_error(zeros, zeros, 0.0) == 0.0
    assert largest(zeros) == 0.0


@pytest.mark.parametrize("place", [0, 2**18 - 1, 2**18, 3 * 2**18 + 2])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_difference_is_found_in_every_piece(place: int, is_transposed: bool) -> None:
    a = torch.randn(5, 3 * 2**18 // 5 + 1)
    b = a.clone().double()
    b.view(-1)[place] += 3.0
    if is_transposed:
        a, b = a.T, b.T
    assert largest_difference(a, b) == pytest.approx(3.0, rel=1e-6)
    assert largest_difference(b, a) == pytest.approx(3.0, rel=1e-6)
    b[-1, -1] = float("nan")
    assert math.isnan(largest_difference(a, b))
    b[-1, -1] = float("inf")
    assert largest_difference(a, b) == math.inf


@pytest.mark.parametrize("count", [1, 2**15, 2**15 + 1, 2**20 + 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_element_is_found_in_tensors_of_all_sizes(count: int, sign: float) -> None:
    t = torch.zeros(count)
    t[-1] = 5.0 * sign
    assert largest(t) == 5.0
    t[0] = math.nan
    assert math.isnan(largest(t))


def test_difference_without_elements_is_zero() -> None:
    assert largest_difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_largest_elements_are_those_of_each_tensor_whatever_its_dtype() -> None:
    one = [torch.tensor([1.0, -3.0]), torch.zeros(0), torch.tensor([[2.0]])]
    assert largest_of_each(one) == [3.0, 0.0, 2.0]
    others = [torch.tensor([-7.0]).double(), torch.tensor([3 + 4j]), torch.tensor([0.5]).half()]
    assert largest_of_each([*one, *others]) == [3.0, 0.0, 2.0, 7.0, 5.0, 0.5]
    assert largest_of_each([]) == []
    with_nan = largest_of_each([torch.tensor([1.0, float("nan")]), torch.ones(2)])
    assert math.isnan(with_nan[0])
    assert with_nan[1] == 1.0


def test_floor_is_relative_to_the_models_largest_gradient() -> None:
    grads = {"small": torch.full((2,), 1e-6), "large": torch.full((2,), -8.0)}
    assert noise_floor(grads) == pytest.approx(8.0 * 1e4 * torch.finfo(torch.float32).eps)
