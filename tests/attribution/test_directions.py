import numpy as np
import pytest

from pergrad.attribution.directions import directions
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
