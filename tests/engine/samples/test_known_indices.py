"""Indices that a traced step makes without its inputs are followed by their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.samples.known_indices import KnownIndices, known_index
from pergrad.errors import MixedSamplesError
from pergrad.runtime import internals
from pergrad.testing import assert_near, loop_grads

MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: torch.arange(5),
    "on the device of a tensor": lambda x: torch.arange(5, device=x.device),
    "moved": lambda x: torch.arange(6).view(2, 3).t()[:, None].expand(3, 4, 2).flatten(1),
    "computed": lambda x: (torch.arange(5) * 3 + 1) % 4,
    "joined": lambda x: torch.cat([torch.zeros(2, dtype=torch.long), torch.tensor([3, 1])]),
    "compared": lambda x: (torch.arange(5) == 3) | ~(torch.arange(5) < 2),
    "numbers": lambda x: -torch.arange(5.0)[1:] + 1,
    "a range between others": lambda x: torch.arange(torch.arange(7.0)[4] + 1),
    "selected by a mask": lambda x: torch.arange(5)[torch.arange(5) > 2],
    "rolled": lambda x: torch.arange(4).roll(1).flip(0).to(torch.int32),
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "drawn": lambda x: torch.randperm(5),
    "picked from data": lambda x: x.long()[torch.arange(3)],
    "sorted data": lambda x: x.argsort(0),
    "added to data": lambda x: torch.arange(5) + x.long(),
    "many numbers": lambda x: torch.arange(5000.0),
    "compared with data": lambda x: torch.arange(5) == x.long(),
}


def _in_trace(function: Callable[[Tensor], Tensor], look: Callable[[Tensor], Any]) -> Any:
    found: list[Any] = []

    def traced(x: Tensor) -> Tensor:
        with KnownIndices():
            t = function(x)
        found.append(look(t))
        return t

    internals.trace(traced)(torch.randn(5))
    return found[0]


@pytest.mark.parametrize("name", MADE)
def test_values_that_no_input_decides_are_known(name: str) -> None:
    known = _in_trace(MADE[name], known_index)
    assert torch.equal(known, MADE[name](torch.randn(5)))


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_inputs_or_chance_decide_are_not_known(name: str) -> None:
    assert _in_trace(UNKNOWN[name], known_index) is None


def test_an_index_that_was_written_to_is_not_known() -> None:
    def written(x: Tensor) -> Tensor:
        index = torch.arange(5)
        part = index[:2]
        part.add_(x.long()[:2])
        return index

    assert _in_trace(written, known_index) is None


def test_nothing_is_known_of_tensors_outside_of_a_trace() -> None:
    with KnownIndices():
        assert known_index(torch.arange(3)) is None


class _Pooled(nn.Module):
    """Takes the token with the largest id of each sample, as CLIP's text model does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, order: Tensor | None = None) -> Tensor:
        x = self.first(self.table(ids)).tanh()
        rows = torch.arange(x.shape[0], device=x.device)
        if order is not None:
            rows = order
        return self.last(x[rows, ids.argmax(-1)])


def _losses(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().sum(1)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_step_that_picks_rows_by_position_is_traced(count: int) -> None:
    torch.manual_seed(0)
    model, grads = _Pooled().double(), pergrad.Grads()
    step = pergrad.compiled(model, _losses, grads, backend="eager")
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(0, 9, (count, 5))
        step(ids)
        for name, expected in loop_grads(model, _losses, ids).items():
            assert_near(grads.result[name], expected)
    assert step.graphs == 1


def test_a_step_that_picks_rows_by_values_of_its_input_looks_whose_they_were() -> None:
    torch.manual_seed(0)
    model, norms = _Pooled().double(), pergrad.Norms()
    ids, order = torch.randint(0, 9, (4, 5)), torch.arange(4)
    step = pergrad.compiled(model, _losses, norms, backend="eager")
    for _ in range(3):
        step(ids, order)
        with pergrad.record(model, pergrad.Norms()) as wanted:
            _losses(model, ids, order).sum().backward()
        assert_near(norms.result, wanted.result)
    assert step.graphs == 1
    with pytest.raises(MixedSamplesError, match="row n of the losses"):
        step(ids, order.flip(0))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g * x.square()


class _Custom(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x)))


def test_a_step_with_a_function_of_its_own_is_traced() -> None:
    torch.manual_seed(0)
    model, grads = _Custom(_Cube).double(), pergrad.Grads()
    step = pergrad.compiled(model, _losses, grads, backend="eager")
    for _ in range(3):
        x = torch.randn(4, 3).double()
        step(x)
        for name, expected in loop_grads(model, _losses, x).items():
            assert_near(grads.result[name], expected)
    assert step.graphs == 1
