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


def alone_with(losses: Callable[..., Any], x: Tensor, **options: Any) -> Alone:
    model = Formula(lambda m, x: m.a(x), a=nn.Linear(D, 2)).double()
    run = PlainRun(
        model, losses, (x,), Options(**options), dict(model.named_parameters()), Snapshot(model)
    )
    return Alone(run, Slices.by_shape((x,), SIZE, 0), run.forward((x,)).detach(), SIZE)


def failing_alone(error: Exception) -> Callable[..., Tensor]:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise error
        return loss(model, x)

    return losses


def test_an_error_of_one_sample_alone_is_told_with_its_number() -> None:
    each = alone_with(failing_alone(ValueError("too few")), numbers(SIZE, D))
    with pytest.raises(CannotLoopError, match="fails for sample 0 alone: ValueError: too few"):
        each.gradients(["a.weight"])


def test_running_out_of_memory_is_not_the_fault_of_a_sample() -> None:
    each = alone_with(failing_alone(torch.OutOfMemoryError("full")), numbers(SIZE, D))
    with pytest.raises(torch.OutOfMemoryError):
        each.gradients(["a.weight"])


@pytest.mark.parametrize(
    ("of_one", "got"),
    [
        (lambda losses: losses.expand(2), r"\(2,\)"),
        (lambda losses: losses.detach(), r"\(1,\)"),
        (lambda losses: losses.item(), "float"),
    ],
)
def test_what_is_no_loss_of_one_sample_is_told(of_one: Callable[..., Any], got: str) -> None:
    def losses(model: nn.Module, x: Tensor) -> Any:
        found = loss(model, x)
        return of_one(found) if len(x) == 1 else found

    with pytest.raises(CannotLoopError, match=f"no loss for sample 0 alone, but {got}"):
        alone_with(losses, numbers(SIZE, D)).gradients(["a.weight"])


@pytest.mark.parametrize("reduction", ["auto", "mean", "sum"])
def test_a_scalar_loss_is_a_sum_or_a_mean_of_those_of_the_samples(reduction: Any) -> None:
    x = numbers(SIZE, D)
    reduce = torch.sum if reduction == "sum" else torch.mean

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return reduce(loss(model, x))

    each = alone_with(losses, x, loss_reduction=reduction)
    rows = each.gradients(["a.weight", "a.bias"])
    model = each._run.model
    assert_all_near(rows, loop_grads(model, loss, x))
    total = torch.autograd.grad(losses(model, x), list(model.parameters()))
    each.check_sums(rows, dict(zip(rows, total, strict=True)))


def test_a_scalar_loss_that_is_neither_is_noticed() -> None:
    each = alone_with(lambda m, x: loss(m, x).sum() * len(x), numbers(SIZE, D))
    with pytest.raises(CannotLoopError, match=r"samples alone give the loss .*the samples meet"):
        each.gradients(["a.weight"])


def test_a_scalar_loss_does_not_tell_random_samples_apart() -> None:
    x = numbers(SIZE, D)
    each = alone_with(lambda m, x: loss(m, x).sum(), x)
    run = each._run
    with pytest.raises(CannotLoopError, match="a scalar loss does not tell the samples apart"):
        InTheBatch(run, each._slices, run.forward((x,)), SIZE, Snapshot(run.model))


def test_random_numbers_that_depend_on_the_samples_are_noticed() -> None:
    def drawing(m: Any, x: Tensor) -> Tensor:
        if float(x[0, 0]) > 0:
            torch.rand(1)
        return m.a(x)

    x = numbers(SIZE, D)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    model = Formula(drawing, a=nn.Linear(D, 2)).double()
    run = PlainRun(model, loss, (x,), Options(), dict(model.named_parameters()), Snapshot(model))
    losses, after = run.forward((x,)).detach(), Snapshot(model)
    with pytest.raises(CannotLoopError, match="random numbers that the model draws depend"):
        InTheBatch(run, Slices.by_shape((x,), SIZE, 0), losses, SIZE, after)
