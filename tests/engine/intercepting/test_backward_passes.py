"""Backward passes: all ways to run one record the same, and those for other tensors record nothing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.collecting import ledger
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers
from tests.engine.intercepting.formulas import D, assert_all_near, linear, model_of, squares

# -- backwards


def test_all_ways_to_run_a_backward_give_the_gradients_of_the_loop() -> None:
    x = numbers(D, D)
    cotangent = numbers(D, D)
    for way in (
        lambda y: y.backward(cotangent),
        lambda y: y.backward(gradient=cotangent),
        lambda y: torch.autograd.backward(y, cotangent),
        lambda y: torch.autograd.backward([y], grad_tensors=[cotangent]),
        lambda y: (y * cotangent).sum().backward(),
        lambda y: torch.autograd.backward(tensors=(y * cotangent).sum()),
        lambda y: y.backward(cotangent, inputs=None),
    ):
        for quantity in (pergrad.Grads(), pergrad.ClippedSum(max_norm=1e9, memory="low")):
            model = model_of(linear)
            try:
                with pergrad.record(model, quantity):
                    way(model(x))
            except TypeError:
                assert isinstance(quantity, pergrad.ClippedSum)  # `tensors` by name
                continue
            expected = loop_grads(model, lambda m, x, c: (m(x) * c).sum(), x, cotangent)
            if isinstance(quantity, pergrad.ClippedSum):
                expected = {name: rows.sum(0) for name, rows in expected.items()}
            assert_all_near(quantity.result, expected)


@pytest.mark.parametrize("memory", ["low", "kept"])
def test_gradients_of_some_tensors_leave_ours_and_our_passes_alone(memory: Any) -> None:
    model, x = model_of(linear), numbers(D, D).requires_grad_()
    clipped = pergrad.ClippedSum(max_norm=0.5, memory=memory)
    with pergrad.record(model, clipped):
        total = squares(model, x).sum()
        (of_input,) = torch.autograd.grad(total, [x], retain_graph=True)
        total.backward(inputs=[x], retain_graph=True)
        torch.autograd.backward(total, inputs=[x], retain_graph=True)
        total.backward()
    (expected_of_input,) = torch.autograd.grad(squares(model, x).sum(), x)
    assert_near(of_input, expected_of_input)
    assert_near(x.grad, 3 * expected_of_input)
    rows = loop_grads(model, squares, x.detach())
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    weights = (0.5 / norms).clamp(max=1)
    assert_all_near(
        clipped.result, {n: torch.einsum("n,n...->...", weights, g) for n, g in rows.items()}
    )


def test_an_error_in_a_backward_for_others_does_not_leave_the_ledger_paused() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("stop")

    model, x = model_of(linear), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = squares(model, x).sum()
        handle = x.register_hook(fail)
        with pytest.raises(KeyError):
            torch.autograd.grad(total, x, retain_graph=True)
        handle.remove()
        total.backward()
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_step_of_two_passes(reentrant: bool, is_first: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if not m.training:
            return F.linear(F.linear(x if is_first else F.linear(x, m.w), m.w).tanh(), m.w)
        h = x if is_first else F.linear(x, m.w)  # then no earlier pass runs the checkpoint
        h = checkpoint(lambda h: F.linear(h, m.w), h, use_reentrant=reentrant)
        return F.linear(h.tanh(), m.w)

    model, x = model_of(forward), numbers(D, D).requires_grad_()
    clipped = pergrad.ClippedSum(max_norm=0.5, memory="low")

    def step() -> None:
        with pergrad.record(model, clipped):
            squares(model, x).sum().backward()

    if reentrant:
        with pytest.raises(PergradError, match='or use memory="kept"'):
            step()
        return
    step()
    rows = loop_grads(model.eval(), squares, x.detach())
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    weights = (0.5 / norms).clamp(max=1)
    assert_near(clipped.result["w"], torch.einsum("n,n...->...", weights, rows["w"]))


def test_a_reentrant_checkpoint_without_a_weight_is_allowed_in_a_step_of_two_passes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(checkpoint(torch.tanh, x, use_reentrant=True), m.w)

    model, x = model_of(forward), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.ClippedSum(max_norm=1e9, memory="low")) as total:
        squares(model, x).sum().backward()
    expected = loop_grads(model_of(lambda m, x: F.linear(x.tanh(), m.w)), squares, x.detach())
    assert_near(total.result["w"], expected["w"].sum(0))


def test_an_error_in_an_earlier_pass_is_the_callers_own() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("stop")

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.linear(x, m.w)
        h.register_hook(fail)
        return F.linear(h, m.w)

    model = model_of(forward)
    with (
        pytest.raises(KeyError, match="stop"),
        pergrad.record(model, pergrad.ClippedSum(max_norm=1.0, memory="low")),
    ):
        squares(model, numbers(3, D)).sum().backward()


def test_other_leaves_get_their_gradient_once_in_a_step_of_two_passes() -> None:
    model, x = model_of(linear), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.ClippedSum(max_norm=1.0, memory="low")):
        squares(model, x).sum().backward()
    (expected,) = torch.autograd.grad(squares(model, x).sum(), x)
    assert_near(x.grad, expected)


def test_nothing_waits_longer_than_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: True)
    model, x = model_of(linear), numbers(D, D)
    expected = loop_grads(model, squares, x)
    with pergrad.record(model, pergrad.Grads()) as grads:
        squares(model, x).sum().backward()
        x.zero_()  # the next batch is read into the same memory
    assert_all_near(grads.result, expected)
