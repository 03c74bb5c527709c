import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pergrad.errors import EvaluationError
from pergrad.evaluate import Task
from pergrad.evaluate.task import evaluating, final, outputs_of, retrained
from tests.evaluate.tasks import blob_task, blobs, losses, mean_task, network


def test_losses_are_those_of_eval_mode_and_modes_are_restored():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9))
    task = blob_task()
    x, y = blobs()
    found = task.losses(model, task.dataset)
    expected = losses(model[0], x, y).detach().double().numpy()
    assert found == pytest.approx(expected)
    assert model.training
    assert model[1].training


def test_outputs_are_the_negative_loss_or_what_the_task_measures():
    task = blob_task()
    model = network()
    assert task.outputs(model, task.queries) == pytest.approx(-task.losses(model, task.queries))
    other = Task(
        *(task.train, task.dataset, task.queries, task.loss),
        output=lambda model, x, y: model(x)[:, 0],
    )
    expected = model(blobs(9, seed=1)[0])[:, 0].detach().numpy()
    assert other.outputs(model, task.queries) == pytest.approx(expected)


def test_data_of_more_than_one_batch_keeps_its_order():
    data = TensorDataset(torch.arange(600.0))
    task = Task(lambda i, s: nn.Identity(), data, data, lambda model, x: x)
    assert task.losses(nn.Identity(), data) == pytest.approx(range(600))


def test_a_loss_that_is_a_mean_is_refused():
    task = blob_task()
    bad = Task(task.train, task.dataset, task.queries, lambda model, x, y: model(x).mean())
    with pytest.raises(EvaluationError, match=r"batch of 60 has shape \(\): return one number"):
        bad.losses(network(), task.dataset)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": 3}, "task.train must be callable, got int"),
        ({"loss": None}, "task.loss must be callable, got NoneType"),
        ({"dataset": []}, "task.dataset is empty"),
        ({"queries": iter([1])}, "task.queries must have a length"),
    ],
)
def test_a_bad_task_is_refused(change, words):
    fields = {"train": print, "dataset": [1], "queries": [1], "loss": print}
    with pytest.raises(EvaluationError, match=words):
        Task(**{**fields, **change})


def test_the_last_checkpoint_is_the_final_model():
    first, last = nn.Identity(), nn.Identity()
    assert final([first, last]) is last
    assert final(last) is last
    with pytest.raises(EvaluationError, match="train returned dict"):
        final({"model": last})
    with pytest.raises(EvaluationError, match="train returned list"):
        final([])


def test_many_must_yield_a_model_for_each_job():
    class Train:
        def __call__(self, indices, seed):
            return nn.Identity()

        def many(self, jobs):
            yield nn.Identity()

    data = TensorDataset(torch.arange(4.0))
    task = Task(Train(), data, data, lambda model, x: x)
    jobs = [(torch.arange(2), 0), (torch.arange(2), 1)]
    with pytest.raises(EvaluationError, match="yielded 1 models for 2 jobs"):
        list(retrained(task, jobs))


def test_progress_counts_models_and_divergence_is_an_error():
    task, seen = mean_task(), []
    jobs = [(torch.arange(3), 0), (torch.arange(5), 1)]
    found = outputs_of(task, jobs, watch=lambda *told: seen.append(told))
    assert seen == [(1, 2, "retraining"), (2, 2, "retraining")]
    assert found[0] == pytest.approx([-(101.0**2), -(99.0**2), -(199.0**2)])
    bad = Task(
        lambda i, s: nn.Identity(), *(task.dataset,) * 2, lambda model, x: x[:, 0] * float("nan")
    )
    with pytest.raises(EvaluationError, match="seed 0\\) gives outputs that are not finite"):
        outputs_of(bad, jobs)


def test_eval_mode_ends_also_after_an_error():
    model = nn.Dropout()
    with evaluating(model):
        assert not model.training
    assert model.training
    with pytest.raises(ZeroDivisionError), evaluating(model):
        model(1 / 0)
    assert model.training
