import numpy as np
import pytest
import torch

from pergrad.attribution import leave_one_out, self_influence
from pergrad.attribution.labels.leave_one_out import _DAMPINGS, LeaveOneOut, _Prepared


def by_fitting_again(features: np.ndarray, labels: np.ndarray, classes: int) -> np.ndarray:
    """Fit a ridge regression without each sample in turn, and choose the best damping."""
    z, y = _Prepared(features)[:], np.eye(classes)[labels]
    found = []
    for damping in _DAMPINGS:
        rows = []
        for n in range(len(z)):
            kept = np.arange(len(z)) != n
            matrix = z[kept].T @ z[kept] + damping * np.eye(z.shape[1])
            rows.append(z[n] @ np.linalg.solve(matrix, z[kept].T @ y[kept]))
        found.append(np.stack(rows))
    return min(found, key=lambda predictions: np.square(predictions - y).mean())


@pytest.mark.parametrize("shape", [(30, 4), (12, 40), (13, 12)])
def test_predictions_are_those_of_fitting_again_without_each_sample(shape) -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, size=shape[0])
    features = generator.normal(size=shape) + labels[:, None]
    expected = by_fitting_again(features, labels, 3)
    np.testing.assert_allclose(leave_one_out(features, labels, 3), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5000, 20), (300, 20), (20, 90)])
def test_influence_is_the_self_influence_of_the_centred_features(shape, dtype) -> None:
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 3, size=shape[0])
    features = (generator.normal(size=shape) * np.arange(1, shape[1] + 1) + 5).astype(dtype)
    found = LeaveOneOut(features, labels, 3, damping=0.2).influence
    expected = self_influence(features - features.mean(axis=0), damping=0.2)
    np.testing.assert_allclose(found, expected, rtol=1e-4 if dtype == np.float32 else 1e-9)


def test_predictions_from_float32_are_those_from_float64_also_of_a_sample_far_away() -> None:
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 3, size=5000)
    features = (generator.normal(size=(5000, 30)) + labels[:, None]).astype(np.float32)
    features[7] *= 1e4
    found = leave_one_out(features, labels, 3)
    expected = leave_one_out(features.astype(np.float64), labels, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_unit_of_the_features_does_not_matter(scale) -> None:
    generator = np.random.default_rng(1)
    features, labels = generator.normal(size=(20, 3)), np.arange(20) % 2
    expected = leave_one_out(features, labels, 2)
    np.testing.assert_allclose(leave_one_out(features * scale, labels, 2), expected, rtol=1e-9)


def test_features_that_say_nothing_give_the_shares_of_the_classes() -> None:
    found = leave_one_out(np.zeros((5, 3)), np.array([0, 0, 0, 0, 1]), 2)
    assert found[:4, 0] == pytest.approx(found[0, 0])
    assert (found[:4].argmax(axis=1) == 0).all()
    assert np.isfinite(found).all()


def test_the_number_of_threads_is_left_as_it_was_and_changes_nothing() -> None:
    generator = np.random.default_rng(2)
    features, labels = generator.normal(size=(300, 80)), generator.integers(0, 4, 300)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(leave_one_out(features, labels, 4).tobytes())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
