"""Randomly weighted sums are those of the loop, and one wrong sample moves them."""

import pytest
import torch
from torch import nn

import pergrad
from pergrad.engine.checking.attribution import Attribution, Judge, coarsest, random_weights
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers

SIZE, D, OUT = 5, 4, 3


def test_sums_are_those_of_the_loop_with_the_weights_that_were_drawn() -> None:
    model, x = (
        nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, OUT)).double(),
        numbers(SIZE, D),
    )
    attribution = Attribution(torch.Generator().manual_seed(0))
    with pergrad.record(model, attribution):
        model(x).pow(3).sum().backward()
    expected = loop_grads(model, lambda m, x: m(x).pow(3).sum(), x)
    for name, rows in expected.items():
        weighted = torch.einsum("n,n...->...", attribution.weights, rows)
        assert_near(attribution.result[name], weighted, name)


def test_weights_that_are_given_are_used() -> None:
    model, weights = nn.Linear(D, 1, bias=False).double(), numbers(SIZE)
    attribution, x = Attribution(torch.Generator(), weights), numbers(SIZE, D)
    with pergrad.record(model, attribution):
        model(x).sum().backward()
    torch.testing.assert_close(attribution.result["weight"][0], weights @ x)


def test_two_backward_passes_add_up() -> None:
    model, x = nn.Linear(D, 1, bias=False).double(), numbers(SIZE, D)
    attribution = Attribution(torch.Generator(), torch.ones(SIZE, dtype=torch.float64))
    with pergrad.record(model, attribution):
        out = model(x)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    torch.testing.assert_close(attribution.result["weight"][0], 2 * x.sum(0))


def test_the_users_random_state_is_not_drawn_from() -> None:
    before = torch.get_rng_state()
    random_weights(100, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_are_bounded_away_from_zero_and_have_both_signs() -> None:
    weights = random_weights(1000, torch.Generator().manual_seed(1))
    assert bool(((weights.abs() >= 1) & (weights.abs() <= 2)).all())
    assert 300 < int((weights > 0).sum()) < 700
    assert len(weights.unique()) == 1000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_judge_accepts_rounding_and_no_more(dtype: torch.dtype) -> None:
    judge, wanted = Judge(dtype), {"a": numbers(50), "b": numbers(50)}
    inside = {name: t * (1 + judge.tolerance / 2) for name, t in wanted.items()}
    outside = {name: t * (1 + 2 * judge.tolerance) for name, t in wanted.items()}
    assert all(error <= judge.tolerance for error in judge.errors(inside, wanted).values())
    assert all(error > judge.tolerance for error in judge.errors(outside, wanted).values())


def test_noise_of_a_parameter_whose_gradient_is_zero_is_no_error() -> None:
    judge, wanted = Judge(torch.float32), {"a": torch.ones(3), "b": torch.full((3,), 1e-8)}
    assert judge.errors({"a": torch.ones(3), "b": -wanted["b"]}, wanted)["b"] <= judge.tolerance
    assert judge.errors({"a": torch.ones(3), "b": 1e3 * wanted["b"]}, wanted)["b"] > judge.tolerance


def test_another_shape_or_nan_is_no_small_error() -> None:
    judge = Judge(torch.float64)
    assert judge.error(torch.zeros(2), torch.zeros(3), 1.0) == float("inf")
    assert not judge.error(torch.full((2,), torch.nan), torch.ones(2), 1.0) <= 1e9


def test_the_coarsest_dtype_is_that_with_the_largest_rounding() -> None:
    assert coarsest([torch.float64, torch.bfloat16, torch.float16]) is torch.bfloat16
