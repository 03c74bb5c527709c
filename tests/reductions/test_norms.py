"""Squared norms by every way, against those of the gradients themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import Convolution, Factor, OuterProduct, RowSum, joined
from pergrad.reductions.norms import by_gram, by_rank_one, by_tiles, gram_is_cheaper, squared_norms
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
    with_bad_sample,
)
from tests.reductions.memory import largest_tensor


def expected(factors: list[Factor]) -> Tensor:
    return (
        dense_of(factors)
        .flatten(1 if dense_of(factors).dim() > 1 else 0)
        .square()
        .view(factors[0].shape[0], -1)
        .sum(1)
    )


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", CASES)
def test_squared_norms_are_those_of_the_gradients(name: str, bound: int) -> None:
    found = squared_norms(factors_of(name), bound)
    assert found.dtype == torch.float64
    assert_near(found, expected(CASES[name]()), name)
    assert_near(by_tiles(factors_of(name), bound), expected(CASES[name]()), "by tiles")
