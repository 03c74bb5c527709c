"""Ordinary gradients are dense, and zeros where nothing reaches a parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.engine.looping.pulling_back import pulled_back
from pergrad.testing import assert_near
from tests.engine.exactness import numbers


def test_unreached_parameters_have_zeros_and_sparse_gradients_are_dense() -> None:
    table, unused = nn.Embedding(7, 2, sparse=True).double(), nn.Parameter(numbers(2))
    out = table(torch.arange(3)).sum()
    named = {"table": table.weight, "unused": unused}
    found = pulled_back([out], [torch.ones_like(out)], named, list(named.values()))
    assert not found["table"].is_sparse
    assert found["table"].any()
    assert not found["unused"].any()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@pytest.mark.parametrize("runs_python", [False, True])
def test_functions_of_gradients_take_their_place(runs_python: bool) -> None:
    shared, table = nn.Linear(2, 2).double(), nn.Embedding(7, 2, sparse=True).double()
    unused, other = nn.Parameter(numbers(2)), nn.Parameter(numbers(2))
    out = (shared(shared(table(torch.arange(3)))) * other).sum()
    out = _Doubled.apply(out) if runs_python else out
    named = {"w": shared.weight, "table": table.weight, "unused": unused, "other": other}
    ones = [torch.ones_like(out)]
    plain = pulled_back([out], ones, named, list(named.values()), retain_graph=True)
    squares = {name: lambda g: g.square().sum() for name in ("w", "table", "unused")}
    found = pulled_back([out], ones, named, list(named.values()), reduced=squares)
    assert list(found) == list(named)
    for name in squares:
        assert_near(found[name], plain[name].square().sum(), name)
    assert_near(found["other"], plain["other"])
    assert all(not p._backward_hooks for p in named.values())
