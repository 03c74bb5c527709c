import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from pergrad.evaluate import Task, duplicates
from pergrad.evaluate.gradients import GRADIENTS, by_index
from tests.evaluate.tasks import blob_task, losses


def plain_gradients(model, x, y):
    rows = []
    for n in range(len(x)):
        grads = torch.autograd.grad(
            losses(model, x[n : n + 1], y[n : n + 1]).sum(), [*model.parameters()]
        )
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).double().numpy()


def test_gradient_dots_are_those_of_a_loop():
    task = blob_task()
    model = task.train(torch.arange(60), 0)
    train, queries = (
        plain_gradients(model, *data.tensors) for data in (task.dataset, task.queries)
    )
    found = GRADIENTS["gradient dots"](task, [model, model], 0)
    scale = np.abs(queries @ train.T).max()
    assert found == pytest.approx(
        queries @ train.T, abs=2e-3 * scale
    )  # rows are stored in half precision


def test_the_index_uses_all_checkpoints_and_the_other_one_the_last():
    task = blob_task(epochs=4, checkpoints=2)
    states = task.train(torch.arange(60), 0)
    alone = [by_index(task, state, 0, dim=64) for state in states]
    both = GRADIENTS["index"](task, states, 0, dim=64)
    cosine = np.corrcoef(both.ravel(), (alone[0] + alone[1]).ravel())[0, 1]
    assert cosine > 0.999
    assert GRADIENTS["index, final model"](task, states, 0, dim=64) == pytest.approx(alone[1])


def test_the_index_finds_copies():
    task = blob_task(epochs=5, checkpoints=2)

    def index(trained, dataset, queries):
        return by_index(Task(task.train, dataset, queries, losses), trained, 0, dim=64)

    found = duplicates(index, task, count=15, noise=0.01, baselines=False)
    assert found["index"].mean > 0.5


def test_more_queries_than_a_batch_keep_their_order():
    task = blob_task(epochs=1)
    x, y = task.dataset.tensors
    many = Task(task.train, task.dataset, TensorDataset(x.repeat(5, 1), y.repeat(5)), losses)
    model = task.train(torch.arange(60), 0)
    found = by_index(many, model, 0, dim=64)
    assert found.shape == (300, 60)
    assert found[240:] == pytest.approx(found[:60], rel=1e-3, abs=1e-3 * np.abs(found).max())
