import numpy as np
import pytest
import torch
from torch import nn

from pergrad.errors import EvaluationError
from pergrad.evaluate import Task, duplicates, facts
from tests.evaluate.tasks import blob_task

TEXTS = ["the red fox sleeps", "a dog eats bread", "rain falls on the sea", "the fox eats a hen"]


def text_task(queries):
    return Task(lambda i, s: nn.Identity(), TEXTS, queries, lambda model, *x: torch.zeros(len(x)))


def test_planted_samples_must_come_first():
    scores = np.array([[0.0, 3, 2, 1], [3.0, 2, 1, 0]])
    task = text_task(["a", "b"])
    assert facts(scores, task, [1, 1], baselines=False)["scores"].mean == 0.5
    assert facts(scores, task, [1, 1], k=2, baselines=False)["scores"].mean == 1
    assert facts(scores, task, [3, [1, 0]], baselines=False)["scores"].mean == 0.5


def test_ties_are_not_found():
    found = facts(np.zeros((2, 4)), text_task(["a", "b"]), [0, 3], baselines=False)
    assert found["scores"].mean == 0


def test_bm25_finds_texts_and_baselines_that_do_not_apply_are_told():
    found = facts({}, text_task(["fox hen", "sea rain"]), [3, 2])
    assert found["BM25"].mean == 1
    assert "nearest inputs" not in found.values
    assert any(note.startswith("nearest inputs left out:") for note in found.notes)


def test_copies_without_noise_are_their_own_nearest_inputs():
    found = duplicates("nearest inputs", blob_task(epochs=1), count=20, noise=0.001)
    assert found["nearest inputs"].mean == 1
    assert found["random"].mean < 0.3
    noisy = duplicates("nearest inputs", blob_task(epochs=1), count=20, noise=2.0)
    assert noisy["nearest inputs"].mean < 0.7


def test_copies_of_tokens_keep_all_but_a_share():
    data = [torch.randint(50, (10,), generator=torch.Generator().manual_seed(n)) for n in range(30)]
    task = Task(lambda i, s: nn.Identity(), data, data, lambda model, x: x.sum(1).float())
    assert duplicates("BM25", task, count=10, noise=0.2, baselines=False)["BM25"].mean == 1


@pytest.mark.parametrize(
    ("planted", "words"),
    [([1], "planted has 1 entries for 2 queries"), ([1, 9], "no indices"), ([1, []], "no indices")],
)
def test_bad_places_are_refused(planted, words):
    with pytest.raises(EvaluationError, match=words):
        facts(np.zeros((2, 4)), text_task(["a", "b"]), planted)


def test_copies_of_texts_are_refused():
    with pytest.raises(EvaluationError, match="first part of an item is a str"):
        duplicates("BM25", text_task(["a"]), count=2)
    with pytest.raises(EvaluationError, match="count=9: choose 1 to 4"):
        duplicates("BM25", text_task(["a"]), count=9)
