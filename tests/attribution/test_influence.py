import numpy as np
import pytest
from scipy.stats import spearmanr

from pergrad.attribution import self_influence
from pergrad.attribution.influence import outlying
from tests.attribution.gradient_cases import gradients


def by_the_formula(rows: np.ndarray, damping: float) -> np.ndarray:
    """One sample at a time, with an explicit inverse."""
    samples, width = rows.shape
    moment = sum(np.outer(row, row) for row in rows) / samples
    inverse = np.linalg.inv(moment + damping * np.trace(moment) / width * np.eye(width))
    return np.array([row @ inverse @ row for row in rows])


@pytest.mark.parametrize("shape", [(40, 6), (6, 40), (1, 5), (7, 1)])
@pytest.mark.parametrize("damping", [1.0, 0.1, 1e-3])
def test_influence_is_that_of_the_formula(shape, damping) -> None:
    rows = gradients(*shape)
    np.testing.assert_allclose(
        self_influence(rows, damping=damping), by_the_formula(rows, damping), rtol=1e-9
    )


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_influence_has_no_unit(scale) -> None:
    rows = gradients(20, 4)
    np.testing.assert_allclose(self_influence(scale * rows), self_influence(rows), rtol=1e-9)


def test_influence_does_not_depend_on_the_order_of_the_samples() -> None:
    rows = gradients(20, 4)
    np.testing.assert_allclose(self_influence(rows[::-1])[::-1], self_influence(rows), rtol=1e-9)


def test_influence_is_shared_among_copies() -> None:
    rows = np.zeros((110, 5))
    rows[:100, :4] = gradients(100, 4)
    rows[100:, 4] = 3.0
    alone = np.delete(rows, range(101, 110), axis=0)
    many, one = self_influence(rows, damping=1e-9), self_influence(alone, damping=1e-9)
    assert one[100] / many[100] == pytest.approx(10 * 101 / 110, rel=1e-6)


def test_influence_of_zero_gradients_is_zero() -> None:
    assert self_influence(np.zeros((3, 4))).tolist() == [0.0, 0.0, 0.0]
    vanishing = np.full((3, 4), 1e-42, dtype=np.float32)
    assert self_influence(vanishing).tolist() == [0.0, 0.0, 0.0]


def test_float32_sketches_give_float64_influence() -> None:
    rows = gradients(30, 8).astype(np.float32)
    found = self_influence(rows)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, by_the_formula(rows.astype(np.float64), 0.1), rtol=1e-5)


@pytest.mark.parametrize("factor", [1e4, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_exploding_sample_leaves_the_others_their_order(factor, dtype) -> None:
    rows = (gradients(400, 8) * np.arange(1, 9)).astype(dtype)
    exploded = rows.copy()
    exploded[5] *= dtype(factor)
    before, after = self_influence(rows), self_influence(exploded)
    assert after.argmax() == 5
    assert np.isfinite(after).all()
    others = np.delete(np.arange(400), 5)
    agreement = spearmanr(before[others], after[others]).statistic
    assert agreement > 0.4
    lengths = np.linalg.norm(rows[others].astype(np.float64), axis=1)
    assert agreement > spearmanr(before[others], lengths).statistic


def test_a_short_gradient_in_a_direction_of_its_own_is_an_outlier():
    generator = np.random.default_rng(0)
    rows = np.concatenate([100 + 30 * generator.normal(size=(50, 1)), np.zeros((50, 3))], axis=1)
    rows[:, 1:] = generator.normal(size=(50, 3))
    rows[9] = [0.0, 0.5, 0.0, 0.0]
    assert outlying(rows).argmax() == 9
    long = rows.copy()
    long[3] = [100.0, 30.0, 0.0, 0.0]
    assert outlying(long).argsort()[-2:].tolist() in ([3, 9], [9, 3])


@pytest.mark.parametrize("far", [1.0, 1e3])
def test_outliers_by_a_known_influence_are_those_without_unless_a_sample_is_far(far) -> None:
    rows = gradients(200, 5)
    rows[3] *= far
    known = self_influence(rows - rows.mean(axis=0)) if far == 1 else np.full(200, 1e9)
    np.testing.assert_allclose(outlying(rows, None, known), outlying(rows), rtol=1e-9)
