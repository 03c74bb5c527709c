"""A plain run begins from the same state each time, and counts its backward passes."""

import torch
from torch import Tensor, nn

from pergrad.engine.looping.plain_run import PlainRun
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.testing import assert_near
from tests.engine.exactness import numbers


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).sum(1)


def run_of(model: nn.Module, x: Tensor) -> PlainRun:
    named = dict(model.named_parameters())
    return PlainRun(model, loss, (x,), Options(), named, Snapshot(model))


def test_runs_draw_the_same_numbers_and_begin_with_the_same_buffers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()).double()
    run = run_of(model, numbers(4, 3))
    first = run.forward(run.batch)
    assert torch.equal(run.forward(run.batch), first)
    assert model[0].num_batches_tracked == 1


def test_losses_are_pulled_back_with_weights() -> None:
    model, x = nn.Linear(3, 2).double(), numbers(4, 3)
    run, weights = run_of(model, x), numbers(4)
    found = run.pulled_back(run.forward((x,)), weights, ["weight"])
    (expected,) = torch.autograd.grad(loss(model, x) @ weights, [model.weight])
    assert_near(found["weight"], expected, "weight")
    assert list(found) == ["weight"]
    assert run.passes == 1


def test_dtypes_are_those_of_parameters_and_autocast() -> None:
    model = nn.Linear(3, 2).double()
    assert run_of(model, numbers(4, 3)).dtypes == {torch.float64}
    with torch.autocast("cpu", torch.bfloat16):
        assert run_of(model, numbers(4, 3)).dtypes == {torch.float64, torch.bfloat16}
    assert run_of(nn.Linear(2, 2, dtype=torch.complex64), numbers(1)).dtypes == {torch.float32}
