import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from pergrad.errors import EvaluationError
from pergrad.evaluate import correlations, draw_subsets, lds
from tests.evaluate.tasks import blob_task, exact_scores, mean_task


def test_exact_scores_have_lds_one_and_reversed_ones_are_told():
    task = mean_task()
    exact = exact_scores(task)
    found = lds({"exact": exact, "reversed": -exact}, task, subsets=20, repeats=2, seeds=2)
    assert found["exact"].mean == pytest.approx(1)
    assert found["reversed"].mean == pytest.approx(-1)
    assert [note for note in found.notes if "sign" in note] == [
        "reversed predicts the opposite: is its sign reversed? scores are positive where a sample helps"
    ]
    assert abs(found["random"].mean) < 0.5
    assert found.values["exact"].shape == (2, 3)
    assert found.about["subsets"] == 20


def test_correlations_are_those_of_scipy():
    generator = np.random.default_rng(0)
    scores, outputs = generator.normal(size=(4, 30)), generator.normal(size=(10, 4)).round(1)
    masks = draw_subsets(30, 10, 0.5, 3)
    found = correlations(scores, masks, outputs)
    for q in range(4):
        sums = [scores[q, mask].sum() for mask in masks]
        assert found[q] == pytest.approx(spearmanr(sums, outputs[:, q]).statistic)


def test_constant_scores_predict_nothing():
    masks = draw_subsets(10, 8, 0.5, 0)
    assert correlations(np.ones((2, 10)), masks, np.random.rand(8, 2)).tolist() == [0, 0]


def test_subsets_have_one_size_and_depend_on_the_seed():
    first, again, other = (draw_subsets(21, 6, 1 / 3, seed) for seed in (0, 0, 1))
    assert first.sum(1).tolist() == [7] * 6
    assert (first == again).all()
    assert not (first == other).all()
    assert len({mask.tobytes() for mask in first}) == 6


def test_all_methods_see_the_same_models_and_a_function_gets_what_train_returned():
    task, seen = blob_task(checkpoints=2), []

    def method(trained, dataset, queries):
        seen.append(trained)
        assert dataset is task.dataset
        assert queries is task.queries
        return torch.zeros(9, 60)

    one = lds({"a": method, "b": method}, task, subsets=6, repeats=1, seeds=[3], baselines=False)
    assert [len(trained) for trained in seen] == [2, 2]
    assert seen[0] is seen[1]
    assert one["a"].mean == one["b"].mean == 0


def test_results_repeat_and_seeds_differ():
    task = mean_task(noise=1.0)
    exact = exact_scores(task)
    first, again = (lds(exact, task, subsets=10, repeats=1, seeds=2) for _ in range(2))
    for name in first:
        assert (first.values[name] == again.values[name]).all()
    assert not (first.values["scores"][0] == first.values["scores"][1]).all()


def test_noisy_retraining_bounds_what_any_scores_can_reach():
    task = mean_task(noise=1.0)
    found = lds(exact_scores(task), task, subsets=100, repeats=2, seeds=2)
    (note,) = [note for note in found.notes if "perfect scores" in note]
    ceiling = float(note.split("about ")[1].split(":")[0])
    assert found["scores"].mean == pytest.approx(ceiling, abs=0.1)
    assert ceiling < 0.9


def test_progress_counts_the_models_of_a_seed():
    told = []
    lds(
        exact_scores(mean_task()),
        mean_task(),
        subsets=4,
        repeats=2,
        seeds=1,
        watch=lambda *a: told.append(a),
    )
    assert told[-1] == (8, 8, "retraining, seed 0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subsets": 2}, "needs at least 3"),
        ({"repeats": 0}, "at least one model"),
        ({"fraction": 1.0}, "leaves none in a subset, or all"),
        ({"fraction": float("nan")}, "leaves none in a subset, or all"),
        ({"fraction": 0.0}, "leaves none in a subset, or all"),
        ({"seeds": 0}, "is no seed"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(EvaluationError, match=words):
        lds(exact_scores(mean_task()), mean_task(), **options)
