import pytest
import torch

import attribution as demo
from pergrad.evaluate import facts, lds
from pergrad.evaluate.gradients import by_index
from pergrad.evaluate.task import Task


def small_index(task: Task):
    def index(trained, dataset, queries):
        return by_index(task, trained, 0, dim=256)

    return index


@pytest.mark.slow
def test_the_index_predicts_retraining_on_digits():
    task = demo.digits_task(0)
    found = lds(small_index(task), task, subsets=16, repeats=1, seeds=1)
    assert found["index"].mean > 0.3
    assert found["index"].low > found["random"].high


def test_the_index_finds_planted_sentences():
    task = demo.language_task(0)
    found = facts(small_index(task), task)
    assert found["index"].mean >= 0.95
    assert found["BM25"].mean >= 0.95  # a name is a rare word


def test_a_query_of_a_name_has_one_sentence():
    task = demo.language_task(3)
    x = task.dataset.tensors[0]
    for query, planted in enumerate(task.planted):
        assert (x[:, 0] == task.queries[query][0][0]).nonzero()[:, 0].tolist() == [planted]
        assert torch.equal(x[planted], task.queries[query][0])
