"""Sums are written to `.grad`: replaced, added, and never lost in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError, ScopeError
from pergrad.testing import loop_grads
from tests.quantities.oracle import losses

SUMS: dict[str, Callable[..., Any]] = {
    "Sum": pergrad.Sum,
    "ClippedSum": lambda **options: pergrad.ClippedSum(0.7, **options),
}
each_sum = pytest.mark.parametrize("make", SUMS.values(), ids=SUMS)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


def recorded(found: Any, model: nn.Module, x: Tensor) -> Any:
    with pergrad.record(model, found):
        losses(model, x).sum().backward()
    return found


def test_sum_is_what_training_has_in_grad() -> None:
    model, x = net(), rows(5)
    total = recorded(pergrad.Sum(), model, x)
    total.assign()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    losses(model, x).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(total.result[name], p.grad, rtol=1e-12, atol=0)


def test_two_backward_passes_of_one_forward_add_up_in_a_sum() -> None:
    model, x = net(), rows(3)
    with pergrad.record(model, pergrad.Sum()) as total:
        out = losses(model, x).sum()
        out.backward(retain_graph=True)
        out.backward()
    for name, g in loop_grads(model, losses, x).items():
        torch.testing.assert_close(total.result[name], 2 * g.sum(0))


@each_sum
def test_micro_batches_add_up_by_assigning_with_add(make: Callable[..., Any]) -> None:
    model, x = net(), rows(6)
    whole = recorded(make(), model, x)
    for part in x.split([2, 1, 3]):
        recorded(make(), model, part).assign(add=True)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, whole.result[name], rtol=1e-12, atol=1e-15)


@each_sum
def test_micro_batches_add_up_in_one_quantity_that_accumulates(make: Callable[..., Any]) -> None:
    model, x = net(), rows(6)
    whole, total = recorded(make(), model, x), make(accumulate=True)
    for part in x.split([2, 1, 3]):
        recorded(total, model, part)
    assert total.samples == 6
    for name, t in whole.result.items():
        torch.testing.assert_close(total.result[name], t, rtol=1e-12, atol=1e-15)
    if isinstance(total, pergrad.ClippedSum):
        torch.testing.assert_close(total.norms, whole.norms)


@each_sum
def test_assigning_over_what_no_optimizer_has_stepped_on_is_refused(
    make: Callable[..., Any],
) -> None:
    model, x = net(), rows(4)
    recorded(make(), model, x[:2]).assign()
    before = [p.grad.clone() for p in model.parameters()]
    second = recorded(make(), model, x[2:])
    with pytest.raises(ScopeError, match=r"assign\(add=True\)"):
        second.assign()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    for p in model.parameters():
        p.grad.div_(2)  # scaled, or with noise added: still nobody's step
    with pytest.raises(ScopeError, match="zero_grad"):
        second.assign()
    model.zero_grad(set_to_none=False)
    second.assign()


@each_sum
def test_one_result_is_not_added_twice(make: Callable[..., Any]) -> None:
    model = net()
    found = recorded(make(), model, rows(2))
    found.assign(add=True)
    with pytest.raises(ScopeError, match="twice"):
        found.assign(add=True)
    model.zero_grad()
    found.assign(add=True)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adagrad(p),
    ],
    ids=["sgd", "foreach", "fused", "adamw", "fused adamw", "adagrad"],
)
def test_loop_without_zero_grad_assigns_after_each_step(optimizer: Callable[..., Any]) -> None:
    model = net()
    steps = optimizer(model.parameters())
    for _ in range(3):
        recorded(pergrad.ClippedSum(1.0), model, rows(2)).assign()
        steps.step()


def test_assigning_replaces_what_a_plain_backward_has_left() -> None:
    model, x = net(), rows(2)
    losses(model, x).sum().backward()
    total = recorded(pergrad.Sum(), model, x)
    total.assign()
    assert torch.equal(model[0].weight.grad, total.result["0.weight"])


def test_assigning_with_add_adds_to_what_a_plain_backward_has_left() -> None:
    model, x = net(), rows(2)
    losses(model, x).sum().backward()
    before = model[0].weight.grad
    expected = 2 * before
    recorded(pergrad.Sum(), model, x).assign(add=True)
    assert model[0].weight.grad is before
    torch.testing.assert_close(before, expected)


def test_assigning_without_a_result_is_refused() -> None:
    with pytest.raises(ScopeError, match="no result yet"):
        pergrad.Sum().assign()


def test_reducing_without_other_ranks_is_refused() -> None:
    with pytest.raises(PergradError, match="init_process_group"):
        recorded(pergrad.Sum(), net(), rows(2)).assign(reduce=True)
