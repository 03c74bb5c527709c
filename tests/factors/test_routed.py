"""Rows that are routed to matrices by value, against explicit loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pergrad.factors import Routed
from pergrad.reductions import SampleGradients
from pergrad.testing import assert_near

COUNT, IN, OUT = 3, 4, 5


def made(n: int, t: int, dtype: torch.dtype = torch.float64) -> tuple[Routed, Tensor]:
    """Returns a factor, and its gradients by a loop; no row goes to the second matrix."""
    torch.manual_seed(0)
    x, g = torch.randn(n, t, IN, dtype=dtype), torch.randn(n, t, OUT, dtype=dtype)
    group = torch.randint(0, 2, (n, t)) * 2
    exact = torch.zeros(n, COUNT, IN, OUT, dtype=dtype)
    for k in range(n):
        for j in range(t):
            exact[k, group[k, j]] += torch.outer(x[k, j], g[k, j])
    return Routed(x, g, group, COUNT), exact


SHAPES = [(3, 6), (1, 4), (4, 1), (3, 3), (2, 0), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "t"), SHAPES)
def test_gradients_are_those_of_the_loop(n: int, t: int, dtype: torch.dtype) -> None:
    factor, exact = made(n, t, dtype)
    assert factor.shape == exact.shape
    assert_near(factor.materialize(), exact)
    assert_near(factor.transposed().materialize(), exact.mT)
    assert_near(factor.part(slice(1, None)).materialize(), exact[1:])
    assert_near(factor.part(slice(None), slice(1, 3)).materialize(), exact[:, 1:])


@pytest.mark.parametrize(("n", "t"), SHAPES)
def test_norms_and_sums_are_those_of_the_loop(n: int, t: int) -> None:
    factor, exact = made(n, t)
    weights = torch.rand(n, dtype=torch.float64)
    squares = exact.flatten(1).square().sum(1)
    for bound in (1, 2**20):
        gradients = SampleGradients([factor], bound=bound)
        assert_near(gradients.squared_norms(), squares)
        assert_near(gradients.weighted_sum(weights), (exact * weights.view(-1, 1, 1, 1)).sum(0))
        assert_near(gradients.total(), exact.sum(0))
    for step in (1, 2, 100):
        assert_near(factor.squared_norms(step), squares)


def test_a_sample_of_weight_zero_counts_nothing_even_if_it_is_not_finite() -> None:
    factor, exact = made(3, 6)
    factor.input[1, 2] = torch.nan
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    assert_near(factor.summed(weights, torch.float64), exact[0] + 2 * exact[2])
