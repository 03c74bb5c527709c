import math

import numpy as np
import pytest
import torch
from torch import nn

from pergrad.errors import EvaluationError
from pergrad.evaluate import Task
from pergrad.evaluate.baselines import bm25, by_bm25, by_features, by_inputs, by_loss, by_random
from tests.evaluate.tasks import blob_task, blobs, network


def test_random_scores_depend_on_the_seed():
    task = blob_task()
    first, again, other = (by_random(task, network(), seed) for seed in (1, 1, 2))
    assert first.shape == (9, 60)
    assert (first == again).all()
    assert not (first == other).any()


def test_the_loss_is_the_same_for_every_query():
    task, model = blob_task(), network()
    found = by_loss(task, [network(), model], 0)
    assert found.shape == (9, 60)
    assert (found == task.losses(model, task.dataset)).all()


def test_the_nearest_input_of_the_class_has_the_greatest_score():
    task = blob_task()
    found = by_inputs(task, network(), 0)
    (x, y), (qx, qy) = blobs(), blobs(9, seed=1)
    for q in range(9):
        assert (found[q][(y != qy[q]).numpy()] == 0).all()
        distance = (x - qx[q]).norm(dim=1) + 1e9 * (y != qy[q])
        assert found[q].argmax() == distance.argmin()


def test_features_are_the_inputs_of_the_last_layer_without_dropout():
    task = blob_task()
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    found = by_features(task, model, 0)
    given = Task(
        *(task.train, task.dataset, task.queries, task.loss),
        features=lambda model, x, y: torch.tanh(model[0](x)).detach(),
    )
    assert found == pytest.approx(by_features(given, model, 0), rel=1e-5)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_features_of_sequences_are_means_over_positions():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 5), nn.Linear(5, 20)

        def forward(self, x):
            return self.head(self.embed(x))

    data = [torch.randint(20, (6,)) for _ in range(7)]
    model = Words()
    task = Task(lambda i, s: model, data, data[:2], lambda model, x: model(x).sum((1, 2)))
    found = by_features(task, model, 0)
    means = torch.stack([model.embed(x).mean(0) for x in data]).detach().double()
    squared = torch.cdist(means[:2], means).square()
    assert found == pytest.approx(torch.exp(-2 * squared / squared.median()).numpy(), rel=1e-4)
    with pytest.raises(EvaluationError, match="nearest inputs need numbers"):
        by_inputs(task, model, 0)
    assert by_bm25(task, model, 0).argmax(1).tolist() == [0, 1]


def test_bm25_is_the_formula():
    documents = [list("aab"), list("bc"), list("cccc")]
    found = bm25([list("ac")], documents)
    mean = 3.0
    idf = {"a": math.log(1 + 2.5 / 1.5), "c": math.log(1 + 1.5 / 2.5)}

    def part(word, n):
        f, length = documents[n].count(word), len(documents[n])
        return idf[word] * f * 2.5 / (f + 1.5 * (0.25 + 0.75 * length / mean))

    assert found[0] == pytest.approx(
        [part("a", 0) + part("c", n) * 0 if n == 0 else part("c", n) for n in range(3)]
    )


def test_bm25_of_empty_documents_is_zero():
    assert (bm25([["a"], []], [[], []]) == np.zeros((2, 2))).all()
