import numpy as np
import pytest
import torch

from benchmarks.attribution.__main__ import against, joined
from benchmarks.attribution.data import TASKS, sentences
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


def test_seeds_are_joined_and_compared_query_by_query():
    parts = [
        Evaluation(
            "LDS", {"index": np.full((1, 4), k + 0.5), "kronfluence": np.full((1, 4), float(k))}
        )
        for k in range(3)
    ]
    whole = joined(parts)
    assert whole["index"].by_seed == (0.5, 1.5, 2.5)
    assert against(whole)["kronfluence"]["mean"] == 0.5
