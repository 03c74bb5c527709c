import pytest
import torch

from pergrad.errors import EvaluationError
from pergrad.evaluate import removal
from tests.evaluate.tasks import exact_scores, mean_task


def test_removal_adds_the_loss_that_the_formula_says():
    task = mean_task(count=12)
    found = removal({"exact": exact_scores(task)}, task, k=3, repeats=1)
    # without 0, 1, 2 the mean of 0..11 moves from 5.5 to 7; without 9, 10, 11 to 4
    expected = [107**2 - 105.5**2, 96**2 - 94.5**2, 196**2 - 194.5**2]
    assert found.values["exact"][0] == pytest.approx(expected, rel=1e-5)
    assert found["exact"].mean > found["random"].mean


def test_reversed_scores_lower_the_loss():
    task = mean_task()
    assert removal(-exact_scores(task), task, k=2, repeats=1, baselines=False)["scores"].high < 0


def test_the_same_seeds_are_used_with_and_without_the_samples():
    task = mean_task(noise=5.0)
    found = removal(exact_scores(task), task, k=3, repeats=2, seeds=2, baselines=False)
    assert (found.values["scores"] > 0).all()  # noise of the training cancels


def test_a_set_of_samples_is_retrained_once():
    told = []
    task = mean_task()
    same = torch.arange(12.0).expand(3, 12)
    removal(
        {"a": same, "b": same},
        task,
        repeats=2,
        k=1,
        baselines=False,
        watch=lambda *a: told.append(a),
    )
    assert told[-1][1] == 4  # with all samples, and without one set


@pytest.mark.parametrize("k", [0, 12])
def test_bad_k_is_refused(k):
    task = mean_task()
    with pytest.raises(EvaluationError, match=f"k={k} of 12 samples"):
        removal(exact_scores(task), task, k=k)
    with pytest.raises(EvaluationError, match="repeats=0"):
        removal(exact_scores(task), task, repeats=0)
