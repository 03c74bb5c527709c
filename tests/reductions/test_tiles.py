"""Tiles cover all gradients, each within the bound."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pergrad.reductions.tiles import sample_tiles, whole_batch_tiles, wide_dtype
from pergrad.testing import assert_near
from tests.reductions.factor_cases import CASES, cast, dense_of, factors_of, outer


@pytest.mark.parametrize("bound", [1, 300])
@pytest.mark.parametrize("name", CASES)
def test_tiles_cover_every_entry_once(name: str, bound: int) -> None:
    factors = factors_of(name)
    exact = dense_of(CASES[name]())
    found, seen = torch.zeros_like(exact), torch.zeros_like(exact)
    for samples, rows, gradients in sample_tiles(factors, bound):
        where = (samples, rows) if exact.dim() > 1 else samples
        found[where] += gradients
        seen[where] += 1
    assert (seen == 1).all()
    assert_near(found, exact, "tiles of samples")
    found, seen = torch.zeros_like(exact), torch.zeros_like(exact)
    for rows, gradients in whole_batch_tiles(factors, bound):
        where = (slice(None), rows) if exact.dim() > 1 else slice(None)
        found[where] += gradients
        seen[where] += 1
    assert (seen == 1).all()
    assert_near(found, exact, "tiles of the whole batch")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3000))
def test_tiles_stay_in_the_bound_or_are_one_row(n: int, o: int, i: int, bound: int) -> None:
    factor = outer(n, 2, o, i)
    for _, _, gradients in sample_tiles([factor], bound):
        assert gradients.nbytes <= max(bound, 8 * i)
    for _, gradients in whole_batch_tiles([factor], bound):
        assert gradients.nbytes <= max(bound, 8 * n * i)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.integers(400, 3000))
def test_tiles_are_as_few_as_the_bound_allows_within_a_factor(
    n: int, o: int, i: int, bound: int
) -> None:
    pieces = len(list(sample_tiles([outer(n, 2, o, i)], bound)))
    each = prod((o, i)) * 8
    assert pieces <= (2 * n * each) // bound + n


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tiles_come_in_a_wide_type(dtype: torch.dtype) -> None:
    factors = cast([outer(2, 3)], dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert wide_dtype(factors) == wide
    assert {t.dtype for _, _, t in sample_tiles(factors, 300)} == {wide}
    assert {t.dtype for _, t in whole_batch_tiles(factors, 300)} == {wide}
