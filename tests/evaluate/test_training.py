import pytest
import torch
from torch import nn

from pergrad.errors import EvaluationError
from pergrad.evaluate import Trainer
from tests.evaluate.tasks import blobs, losses, network

x, y = blobs()


def trainer(**options):
    return Trainer(network, losses, (x.double(), y), **{"epochs": 3, "batch_size": 16, **options})


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plainly(indices, seed, *, epochs=3, batch_size=16, sgd=False):
    """One model by an ordinary loop."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = network()
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        order = indices[torch.randperm(len(indices), generator=generator)]
        for rows in order.split(batch_size):
            optimizer.zero_grad()
            losses(model, x[rows].double(), y[rows]).mean().backward()
            optimizer.step()
    return model


def assert_same(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sgd", [False, True])
def test_many_models_equal_ordinary_training_one_by_one(sgd):
    jobs = [(torch.randperm(60)[:20], 5), (torch.arange(7), 6), (torch.arange(30, 50), 7)]
    optimizer = (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)) if sgd else None
    train = trainer(optimizer=optimizer, at_once=2)
    for job, model in zip(jobs, train.many(jobs), strict=True):
        assert_same(model, plainly(*job, sgd=sgd))
        assert_same(model, train(*job))


def test_checkpoints_are_evenly_spaced_and_end_with_the_final_model():
    indices = torch.arange(40)
    found = trainer(epochs=5, checkpoints=3)(indices, 4)
    for model, epochs in zip(found, [2, 3, 5], strict=True):
        assert_same(model, plainly(indices, 4, epochs=epochs))


def test_training_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    trainer()(torch.arange(10), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_buffers_of_each_model_are_its_own():
    def normed():
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    train = Trainer(normed, losses, (x.double(), y), epochs=2, batch_size=10)
    one, two = train.many([(torch.arange(30), 1), (torch.arange(30, 60), 2)])
    assert not torch.allclose(one[1].running_mean, two[1].running_mean)
    torch.testing.assert_close(one[1].running_mean, train(torch.arange(30), 1)[1].running_mean)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"checkpoints": 4}, "checkpoints=4: choose 1 to epochs=3"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(EvaluationError, match=words):
        trainer(**options)
    with pytest.raises(EvaluationError, match=r"the tensors have \[60, 3\] rows"):
        Trainer(network, losses, (x, y[:3]), epochs=1)
    with pytest.raises(EvaluationError, match="a job has no samples"):
        trainer()(torch.arange(0), 0)
