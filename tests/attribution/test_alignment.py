import numpy as np
import pytest

from pergrad.attribution import alignment
from tests.attribution.gradient_cases import gradients


def test_alignment_is_the_cosine_with_the_mean() -> None:
    rows = 0.3 + gradients(30, 5)
    mean = sum(rows) / len(rows)
    expected = [row @ mean / (row @ row) ** 0.5 / (mean @ mean) ** 0.5 for row in rows]
    np.testing.assert_allclose(alignment(rows), expected, rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_alignment_has_no_unit(scale) -> None:
    rows = gradients(30, 5)
    np.testing.assert_allclose(alignment(scale * rows), alignment(rows), rtol=1e-9)


def test_alignment_without_a_direction_is_zero() -> None:
    assert alignment(np.array([[1.0, 2.0], [-1.0, -2.0]])).tolist() == [0.0, 0.0]
    assert alignment(np.zeros((2, 3))).tolist() == [0.0, 0.0]


def test_alignment_of_a_single_sample_is_one() -> None:
    assert alignment(np.array([[3.0, 4.0]])).tolist() == [pytest.approx(1.0)]


def test_alignment_never_leaves_its_range() -> None:
    rows = np.tile(gradients(1, 300, seed=2), (9, 1)).astype(np.float32)
    assert (np.abs(alignment(rows)) <= 1).all()
