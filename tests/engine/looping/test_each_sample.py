"""Each way to the gradients of single samples gives them, and notices samples that meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.engine.looping.each_sample import Alone, InTheBatch
from pergrad.engine.looping.plain_run import CannotLoopError, PlainRun
from pergrad.engine.looping.slicing import Slices
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, assert_all_near, numbers

SIZE, D = 4, 3


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).sum(1)


def ways(function: Callable[..., Tensor], x: Tensor) -> tuple[nn.Module, list[Any], Tensor]:
    model = Formula(function, a=nn.Linear(D, 2)).double()
    parameters = dict(model.named_parameters())
    run = PlainRun(model, loss, (x,), Options(), parameters, Snapshot(model))
    losses, after = run.forward((x,)), Snapshot(model)
    slices = Slices.by_shape((x,), SIZE, 0)
    made = [
        lambda: Alone(run, slices, losses.detach(), SIZE),
        lambda: InTheBatch(run, slices, losses.detach(), SIZE, after),
    ]
    return model, made, losses


def test_both_ways_give_the_loop() -> None:
    x = numbers(SIZE, D)
    model, made, losses = ways(lambda m, x: m.a(x), x)
    names = [name for name, _ in model.named_parameters()]
    expected = loop_grads(model, loss, x)
    total = torch.autograd.grad(losses.sum(), list(model.parameters()))
    for way in made:
        each = way()
        rows = each.gradients(names)
        assert_all_near(rows, expected)
        each.check_sums(rows, dict(zip(names, total, strict=True)))


def test_both_ways_notice_samples_that_meet() -> None:
    _, made, _ = ways(lambda m, x: m.a(x) + x.sum() * 1e-6, numbers(SIZE, D))
    with pytest.raises(CannotLoopError, match=r"loss of sample 0 alone.*samples meet"):
        made[0]().gradients(["a.weight"])
    with pytest.raises(CannotLoopError, match="exchanging other samples changes the losses"):
        made[1]()


def test_sums_that_are_not_those_of_the_batch_are_noticed() -> None:
    model, made, losses = ways(lambda m, x: m.a(x), numbers(SIZE, D))
    (total,) = torch.autograd.grad(losses.sum(), [model.a.weight])
    each = made[0]()
    rows = each.gradients(["a.weight"])
    rows["a.weight"][0, 0, 0] += 1e-3
    with pytest.raises(CannotLoopError, match=r"'a.weight' is off"):
        each.check_sums(rows, {"a.weight": total})


def test_samples_that_are_all_the_same_cannot_be_exchanged() -> None:
    _, made, _ = ways(lambda m, x: m.a(x), torch.ones(SIZE, D).double())
    with pytest.raises(CannotLoopError, match="all samples are the same"):
        made[1]()


def test_a_sample_that_is_not_finite_is_the_same_alone() -> None:
    x = numbers(SIZE, D)
    x[1] = torch.nan
    x[2] = torch.inf
    _, made, _ = ways(lambda m, x: m.a(x), x)
    rows = made[0]().gradients(["a.weight"])["a.weight"]
    assert rows[[0, 3]].isfinite().all()
    assert not rows[[1, 2]].isfinite().any()
    with pytest.raises(CannotLoopError, match="not finite"):
        made[1]()
