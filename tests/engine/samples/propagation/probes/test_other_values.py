"""Calls that are run again with other values in some samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.propagation.probes import other_values
from pergrad.engine.samples.propagation.probes.other_values import (
    are_equal,
    others_stay,
    with_other_values,
)
from pergrad.testing import assert_near
from tests.engine.samples.propagation.calls import call_of, rows


def kept(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 1


@pytest.mark.parametrize("mask", [[True, False, False], [False, True, True]])
def test_other_values_are_valid_ones_and_only_in_some_samples(mask: list[bool]) -> None:
    x, index = torch.tensor([[1.0, 2], [1, 5], [6, 7]]), torch.tensor([4, 5, 6])
    call = call_of(kept, rows(of=x), [rows(of=index), (torch.ones(3), 3)])
    chosen = torch.tensor(mask)
    other, (tokens, (constant, number)) = with_other_values(call, chosen)[0]
    assert torch.equal((other != x).any(1), chosen)
    assert torch.equal(tokens != index, chosen)
    assert set(tokens.tolist()) <= {4, 5, 6}
    assert torch.equal(constant, torch.ones(3))
    assert number == 3
    same = with_other_values(call, None)[0][0]
    assert torch.equal(same, x)
    assert same is not call.args[0]


def test_only_the_arguments_that_are_named_get_other_values() -> None:
    call = call_of(kept, rows(3, 2), rows(3, 2), count=3)
    chosen, changed = torch.tensor([True, False, False]), {id(call.args[1]): call.layouts[1]}
    first, second = with_other_values(call, chosen, changed)[0]
    assert torch.equal(first, call.args[0])
    assert not torch.equal(second, call.args[1])
    replaced = with_other_values(call, chosen, changed, {id(call.args[0]): torch.zeros(3)})[0][0]
    assert torch.equal(replaced, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_results_are_equal_but_for_rounding(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, -2.0, float("nan"), 1e-30, float("inf")]).to(dtype)
    eps = torch.finfo(dtype).eps
    rounded = torch.where(a.abs() < 1.5, a * (1 + eps), a)
    changed = torch.where(a.abs() < 1.5, a * 1.02, a)
    assert not torch.equal(rounded[:1], a[:1])
    assert other_values.are_equal(a, rounded)
    assert not other_values.are_equal(a, changed)
    assert not other_values.are_equal(a, a.nan_to_num())
    assert not other_values.are_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_results_are_equal_where_numbers_or_both_nan() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert other_values.are_equal(x, x.clone())
    assert not other_values.are_equal(x, torch.tensor([1.0, 2.0]))
    assert not other_values.are_equal(x, torch.tensor([1.0 + 1e-6, torch.nan]))
    assert not other_values.are_equal(torch.tensor([1]), torch.tensor([2]))


def test_a_loss_of_a_batch_with_a_nan_is_a_sum_over_the_samples() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    x[1] = torch.nan

    def loss(model: nn.Module, x: Tensor, reduction: str = "sum") -> Tensor:
        return F.triplet_margin_loss(model(x), model(x + 1), model(-x), reduction=reduction)

    found = pergrad.norms(model, loss, x)
    expected = pergrad.norms(model, lambda m, x: loss(m, x, "none"), x)
    assert found.isfinite().tolist() == [True, False, True, True]
    assert_near(found[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 4), (torch.float64, 4)],
)
def test_resultsare_equal_within_the_rounding_of_their_type(dtype: torch.dtype, units: int) -> None:
    eps = torch.finfo(dtype).eps
    one = torch.ones(3, dtype=dtype)
    assert are_equal(one, one * (1 + units * eps))
    assert not are_equal(one, one * (1 + 2 * units * eps))
    assert are_equal(one * torch.nan, one * torch.nan)
    assert not are_equal(one, one * torch.nan)
    assert not are_equal(one.int(), one.int() + 1)


def test_numbers_that_are_small_beside_others_may_be_off_by_their_rounding() -> None:
    a, eps = torch.tensor([1.0, 0.0, torch.inf]), torch.finfo(torch.float32).eps
    assert are_equal(a, torch.tensor([1.0, 0.9 * eps, torch.inf]))
    assert not are_equal(a, torch.tensor([1.0, 1.1 * eps, torch.inf]))


def test_rows_of_other_samples_stay_the_same() -> None:
    scope = Scope(3)
    rows, first = scope.samples(1), torch.tensor([True, False, False])
    a = torch.rand(2, 3)
    b = a.clone()
    assert others_stay(a, b, rows, first)
    b[:, 0] += 1
    assert others_stay(a, b, rows, first)
    assert not others_stay(a, b, rows, ~first)
    assert not others_stay(a, a[:, :2], rows, first)
    assert others_stay(a, b, scope.constant(), ~first)  # what has no samples tells nothing
    one, other = torch.tensor(1.0), torch.tensor(2.0)
    of_first = scope.owned(0, torch.tensor([0]))
    assert others_stay(one, other, of_first, first)
    assert not others_stay(one, other, of_first, ~first)
