import numpy as np
import pytest
import torch

from pergrad.attribution import average_precision
from pergrad.errors import EvaluationError
from pergrad.evaluate import flipped, mislabelled
from tests.evaluate.tasks import blob_task, blobs


def planted():
    labels, wrong = flipped(blobs()[1], 0.1, seed=2)
    return blob_task(epochs=20, y=labels), wrong


def test_flipped_labels_are_other_classes():
    before = torch.tensor([4, 9, 4, 7, 9, 9, 7, 4, 4, 7])
    after, wrong = flipped(before, 0.3)
    assert (before != after).nonzero()[:, 0].tolist() == wrong
    assert len(wrong) == 3
    assert set(after.tolist()) <= {4, 7, 9}


def test_perfect_suspicion_has_precision_one_and_a_matrix_gives_its_diagonal():
    task, wrong = planted()
    suspicion = np.isin(np.arange(60), wrong).astype(float)
    square = np.diag(suspicion) + np.triu(np.ones((60, 60)), 1)
    found = mislabelled({"vector": suspicion, "square": square}, task, wrong, seeds=1)
    assert found["vector"].mean == found["square"].mean == 1
    assert found["nearest inputs"].mean > 0.8
    assert found["random"].mean < 0.5


def test_the_mean_is_the_average_precision():
    task, wrong = planted()
    suspicion = np.random.default_rng(1).normal(size=60)
    found = mislabelled(suspicion, task, wrong, seeds=1, baselines=False)
    expected = average_precision(suspicion, np.isin(np.arange(60), wrong))
    assert found["scores"].mean == pytest.approx(expected)


def test_functions_get_the_training_data_twice():
    task, wrong = planted()

    def method(trained, dataset, queries):
        assert queries is dataset
        return task.losses(trained, dataset)

    found = mislabelled(method, task, wrong, seeds=2)
    assert found["method"].mean == found["loss"].mean


@pytest.mark.parametrize("wrong", [[], [60], [-1]])
def test_bad_places_are_refused(wrong):
    with pytest.raises(EvaluationError, match="wrong must hold indices of the 60"):
        mislabelled("loss", blob_task(), wrong)


def test_labels_that_are_no_classes_are_refused():
    with pytest.raises(EvaluationError, match="cannot be flipped"):
        flipped(torch.zeros(4, dtype=torch.long))
    with pytest.raises(EvaluationError, match="cannot be flipped"):
        flipped(torch.rand(4))
