import numpy as np
import pytest
import torch

from pergrad.errors import EvaluationError
from pergrad.evaluate.baselines import BASELINES
from pergrad.evaluate.methods import named, scores_of
from tests.evaluate.tasks import mean_task


def mine(trained, dataset, queries):
    return torch.zeros(len(queries), len(dataset))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (np.zeros((3, 12)), ["scores"]),
        ([[1.0, 2.0]], ["scores"]),
        (mine, ["mine"]),
        ("loss", ["loss"]),
        (["loss", mine], ["loss", "mine"]),
        ({"a": mine, "b": "BM25"}, ["a", "b"]),
    ],
)
def test_methods_have_names(given, names):
    assert named(given, baselines=False)[1] == tuple(names)
    assert {*named(given)[0]} == {*names, *BASELINES}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("trak9", "'trak9' is not known"),
        ([mine, mine], "two methods are called 'mine'"),
        ([], "no methods"),
    ],
)
def test_bad_methods_are_refused(given, words):
    with pytest.raises(EvaluationError, match=words):
        named(given, baselines=False)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            torch.zeros(12, 3),
            r"shape \(12, 3\), not \(queries, training samples\) = \(3, 12\): transpose it",
        ),
        (torch.zeros(3, 11), r"shape \(3, 11\)"),
        (
            torch.full((3, 12), float("inf")),
            "36 scores of 'a' are not finite, the first of query 0",
        ),
    ],
)
def test_bad_scores_are_refused(scores, words):
    task = mean_task()
    with pytest.raises(EvaluationError, match=words):
        scores_of({"a": scores}, task, task.train(torch.arange(12), 0), 0)


def test_a_baseline_that_does_not_apply_is_left_out_unless_asked_for():
    task = mean_task()
    trained = task.train(torch.arange(12), 0)
    found, notes = scores_of({"random": "random", "BM25": "BM25"}, task, trained, 0)
    assert list(found) == ["random"]
    assert notes == [
        "BM25 left out: BM25 needs texts or tokens: pass tokens=, called as tokens(item)"
    ]
    with pytest.raises(EvaluationError, match="needs texts or tokens"):
        scores_of({"BM25": "BM25"}, task, trained, 0, asked=["BM25"])
