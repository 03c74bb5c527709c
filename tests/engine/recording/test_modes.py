"""Modes of the user that are active around a recording get each function first, as within it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pergrad
from pergrad.runtime import internals
from pergrad.testing import assert_near
from tests.engine.soundness.judge import rows_of_losses, squares


class Changing(TorchFunctionMode):
    """Changes what a hyperbolic tangent returns."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self.change(found) if func is torch.tanh else found


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    parts = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)
    return nn.Sequential(*parts).double(), torch.randn(4, 3, dtype=torch.float64)


def test_a_mode_around_a_recording_that_mixes_samples_is_refused() -> None:
    model, x = made()
    with Changing(lambda h: h - h.mean(0)):
        with pytest.raises(pergrad.PergradError, match="mean"):
            pergrad.grads(model, squares, x)
        with pytest.raises(pergrad.PergradError), pergrad.record(model, pergrad.Norms()):
            squares(model, x).sum().backward()


def test_a_mode_around_a_recording_that_keeps_samples_apart_is_exact() -> None:
    model, x = made()
    with Changing(lambda h: 2 * h):
        _, expected = rows_of_losses(model, squares, x)
        rows = pergrad.grads(model, squares, x)
    for name, grad in expected.items():
        assert_near(rows[name], grad, name)


def test_a_compiled_step_is_exact_with_a_mode_and_without() -> None:
    model, x = made()
    grads, mode = pergrad.Grads(), Changing(lambda h: 2 * h)
    step = pergrad.compiled(model, squares, grads, backend="eager")
    for around in (mode, mode, mode, None, None, None, mode):
        if around is None:
            step(x)
            _, expected = rows_of_losses(model, squares, x)
        else:
            with around:
                step(x)
                _, expected = rows_of_losses(model, squares, x)
        for name, grad in expected.items():
            assert_near(grads.result[name], grad, name)


def test_a_compiled_step_has_a_graph_for_each_mode() -> None:
    model, x = made()
    norms = pergrad.Norms()
    step = pergrad.compiled(model, squares, norms, backend="eager")
    for factor in (1, 1, 2, 2, 1, 2):
        with Changing(partial(torch.mul, torch.tensor(factor))) if factor > 1 else nullcontext():
            step(x)
    assert step.graphs == 1  # each mode has another function
    double = partial(torch.mul, torch.tensor(2.0))
    for _ in range(3):
        with Changing(double):
            step(x)
    assert step.graphs == 2
    with Changing(double):
        assert_near(norms.result, pergrad.norms(model, squares, x))


def test_modes_are_in_their_old_order_after_a_recording_and_after_an_error() -> None:
    model, x = made()
    outer, inner = Changing(lambda h: h), Changing(lambda h: h)
    with outer, torch.device("cpu"), inner:
        before = internals.function_modes()
        pergrad.norms(model, squares, x)
        assert internals.function_modes() == before
        with pytest.raises(RuntimeError), pergrad.record(model, pergrad.Norms()):
            model(x[:, :2])
        assert internals.function_modes() == before
        with pergrad.record(model, pergrad.Norms()) as norms, Changing(lambda h: h):
            squares(model, x).sum().backward()
    assert internals.function_modes() == []
    assert_near(norms.result, pergrad.norms(model, squares, x))
