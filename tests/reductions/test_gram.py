"""Inner products of the gradients with each other, against those of the gradients themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import Factor, OuterProduct, joined
from pergrad.reductions.gram import by_pairs_of_positions, by_rows, gram, gram_against
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
    with_bad_sample,
)
from tests.reductions.memory import largest_tensor


def expected(factors: list[Factor]) -> Tensor:
    flat = dense_of(factors).view(factors[0].shape[0], -1)
    return flat @ flat.T


@pytest.mark.parametrize("name", CASES)
def test_gram_is_that_of_the_gradients(name: str) -> None:
    for bound in BOUNDS:
        found = gram(factors_of(name), bound)
        assert found.dtype == torch.float64
        assert_near(found, expected(CASES[name]()), f"in {bound} bytes")


@pytest.mark.parametrize("name", CASES)
def test_gram_against_stored_gradients_is_that_of_the_gradients(name: str) -> None:
    factors = factors_of(name)
    stored = data(3, *factors[0].shape[1:], seed=9)
    gradients = dense_of(factors)
    exact = gradients.view(N, -1) @ stored.view(3, -1).T
    for bound in BOUNDS:
        found = gram_against(factors, stored, bound)
        assert found.dtype == torch.float64
        assert_near(found, exact, f"in {bound} bytes")
        assert_near(gram_against(factors, gradients, bound), expected(factors), "itself")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(1, 4), st.integers(0, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 3000)
)
def test_both_ways_of_an_outer_product_give_the_same(
    n: int, t: int, o: int, i: int, bound: int
) -> None:
    factor = outer(n, t, o, i)
    exact = expected([factor])
    assert_near(by_pairs_of_positions(factor, bound)[0], exact, "by pairs")
    assert_near(by_rows([factor], bound), exact, "by rows")
    assert_near(gram([factor], bound), exact, "as chosen")


@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_multiplied_and_summed_in_float32(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        exact = expected(factors)
        found = gram(joined(factors), 300)
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_positions_that_cancel_leave_inner_products_exact() -> None:
    a, x = data(2, 1, 40), data(2, 1, 50)
    nearly = -a * (1 + 1e-4 * data(2, 1, 40, seed=3))
    factor = OuterProduct(torch.cat([a, nearly], 1).float(), torch.cat([x, x], 1).float())
    exact = expected([factor])
    found = gram([factor], 10_000)
    assert (found - exact).abs().max() < 1e-3 * exact.abs().max()
    assert (by_pairs_of_positions(factor, 10_000)[0] - exact).abs().max() > 0.1 * exact.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_sample_that_is_not_finite_touches_no_pair_of_others(name: str) -> None:
    stored = data(3, *CASES[name]()[0].shape[1:], seed=9)
    others = torch.tensor([0, 2, 3])

    def of_others(factors: list[Factor], bound: int) -> tuple[Tensor, Tensor]:
        pairs = gram(joined(factors), bound)
        return pairs[others][:, others], gram_against(joined(factors), stored, bound)[others]

    for bound in BOUNDS:
        plain = of_others(CASES[name](), bound)
        for value in (float("nan"), float("inf")):
            found = of_others(with_bad_sample(CASES[name](), 1, value), bound)
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "factor",
    [
        outer(4, 2, 32, 32),
        outer(4, 24, 32, 32),
        convolution(4, (6, 6), (3, 3), channels=8, outputs=16),
        convolution(4, (6, 6), (3, 3), channels=4, outputs=8, groups=2),
    ],
    ids=["pairs", "rows", "convolution", "convolution in groups"],
)
def test_no_intermediate_exceeds_the_bound(factor: Factor) -> None:
    bound = 12_000
    assert largest_tensor(factor.materialize) > bound
    assert factor.scratch * 8 <= bound  # the windows of one sample cannot be had in parts
    assert largest_tensor(lambda: gram([factor], bound)) <= bound
    stored = factor.materialize()
    assert largest_tensor(lambda: gram_against([factor], stored, bound)) <= bound
