"""Rows that are far longer than usual are shortened, all others are left as they are."""

import numpy as np
import pytest

from pergrad.attribution.shortening import shortened


def rows(count=200, *, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 6)).astype(np.float32)


def test_rows_of_usual_length_are_not_copied() -> None:
    given = rows()
    found, factors = shortened(given)
    assert found is given
    assert (factors == 1).all()


@pytest.mark.parametrize("times", [1e2, 1e10, 1e30])
def test_a_long_row_keeps_its_direction_and_gets_the_usual_length(times) -> None:
    given = rows()
    given[7] *= np.float32(times)
    found, factors = shortened(given)
    assert np.flatnonzero(factors < 1).tolist() == [7]
    np.testing.assert_allclose(found[7:8] / factors[7], given[7:8], rtol=1e-5)
    usual = np.median(np.abs(given).max(axis=1))
    np.testing.assert_allclose(np.abs(found[7:8]).max(), usual, rtol=1e-5)
    assert np.array_equal(found[np.arange(7)], given[:7])
    assert (found.shape, found.dtype, len(found)) == (given.shape, given.dtype, len(given))


def test_zeros_and_no_rows_are_left_alone() -> None:
    mostly_zero = np.zeros((9, 2))
    mostly_zero[4] = 1e6
    for given in (mostly_zero, np.zeros((0, 2))):
        assert shortened(given)[0] is given
