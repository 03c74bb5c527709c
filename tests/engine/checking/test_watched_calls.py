"""Calls of a module are watched: what they began from, what reached their outputs, who else used weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.checking.watched_calls import WatchedCalls, tensors_of_output
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import recorded
from pergrad.errors import PergradError
from tests.engine.exactness import Formula, numbers, state_of

SIZE, D, OUT = 5, 4, 3


def watching(model: nn.Module, step: Any, *batch: Any) -> WatchedCalls:
    watched = WatchedCalls(model)
    with (
        watched.watched(),
        recorded(model, [pergrad.Norms()], Options(), journal=watched),
    ):
        step(model, *batch).backward()
    return watched


def test_the_gradients_of_outputs_are_those_of_the_loss_by_position() -> None:
    model = Formula(lambda m, x: {"h": (h := m.body(x)), "n": 3, "y": m.head(h)}, **parts())
    x, before = numbers(SIZE, D), state_of(model)

    def step(m: Any, x: Tensor) -> Tensor:
        out = m(x)
        return (2 * out["h"]).sum() + (5 * out["y"]).sum()

    (call,) = watching(model, step, x).calls
    assert {k: g.unique().tolist() for k, g in call.grads.items()} == {0: [2.0], 1: [5.0]}
    assert state_of(model) == before


def parts() -> dict[str, nn.Module]:
    return {"body": nn.Linear(D, OUT).double(), "head": nn.Linear(OUT, 2).double()}


def test_outputs_without_a_gradient_keep_their_position() -> None:
    model = Formula(lambda m, x: (x.sum(1), m.body(x)), body=nn.Linear(D, OUT).double())
    (call,) = watching(model, lambda m, x: m(x)[1].sum(), numbers(SIZE, D)).calls
    assert list(call.grads) == [1]
    assert len(tensors_of_output(model(numbers(SIZE, D)))) == 2


def test_calls_without_gradients_are_not_counted() -> None:
    def step(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            m(x)
        return m(x).sum()

    assert len(watching(nn.Linear(D, OUT).double(), step, numbers(SIZE, D)).calls) == 1


def test_a_use_outside_of_the_module_is_noted() -> None:
    def step(m: Any, x: Tensor) -> Tensor:
        return F.linear(m(x), m.head.weight).sum()

    watched = watching(Formula(lambda m, x: m.body(x), **parts()), step, numbers(SIZE, D))
    assert list(watched.used_outside) == ["head.weight"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_recomputes_inside(use_reentrant: bool) -> None:
    model = Formula(
        lambda m, x: checkpoint(m.body, x, use_reentrant=use_reentrant), body=parts()["body"]
    )
    x = numbers(SIZE, D).requires_grad_()
    assert watching(model, lambda m, x: m(x).sum(), x).used_outside == {}


def test_inputs_that_were_written_to_are_noticed() -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    (call,) = watching(model, lambda m, x: m(x).sum(), x).calls
    call.check_inputs("certify=True")
    x.add_(1)
    with pytest.raises(PergradError, match=r"certify=True cannot repeat .* changed in place"):
        call.check_inputs("certify=True")
