import numpy as np
import pytest

from pergrad.attribution.directions import directions, shortened
from tests.attribution.gradient_cases import gradients


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_directions_are_rows_over_their_lengths(scale) -> None:
    rows = gradients(5, 7)
    found = directions(scale * rows)
    units, lengths = found[:], found.lengths
    expected = np.sqrt((rows**2).sum(axis=1))
    np.testing.assert_allclose(lengths, scale * expected, rtol=1e-12)
    np.testing.assert_allclose(units, rows / expected[:, None], rtol=1e-12)


def test_large_float32_rows_have_a_finite_length() -> None:
    found = directions(np.full((1, 4), 1e30, dtype=np.float32))
    units, lengths = found[:], found.lengths
    assert units.dtype == np.float32
    assert units.tolist() == [[0.5] * 4]
    assert lengths == pytest.approx([2e30])


def test_rows_of_zero_stay_zero_and_the_argument_is_left_alone() -> None:
    rows = np.array([[0.0, 0.0], [2.0, 0.0]])
    found = directions(rows)
    units, lengths = found[:], found.lengths
    assert units.tolist() == [[0, 0], [1, 0]]
    assert lengths.tolist() == [0, 2]
    assert rows.tolist() == [[0, 0], [2, 0]]


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
