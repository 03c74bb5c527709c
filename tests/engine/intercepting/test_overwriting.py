"""Weights written to in place, themselves and through views: the loop's gradients, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pergrad
from pergrad.errors import PergradError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of, state_of, total

D = 4


def rows_scaled(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    w[1:].mul_(m.v)
    return F.linear(x, w)


def row_filled(m: Any, x: Tensor) -> Tensor:
    w = m.w * 2
    w[0] = m.v
    return F.linear(x, w)


def column_zeroed(m: Any, x: Tensor) -> Tensor:
    w = m.w * 2
    w[:, 1].zero_()
    return F.linear(x, w)


def used_before_and_after(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    before = F.linear(x, w)
    w[2].add_(m.v)
    return before * F.linear(x, w)


def view_taken_before(m: Any, x: Tensor) -> Tensor:
    w = m.w.sin()
    first = w[0]
    w.mul_(2)
    return x * first + F.linear(x, w)


def buffer_written_twice(m: Any, x: Tensor) -> Tensor:
    buffer = torch.zeros(D, D, dtype=x.dtype)
    buffer.copy_(m.w)
    buffer.mul_(m.v)
    return F.linear(x, buffer)


EXACT: dict[str, Callable[..., Tensor]] = {
    "rows scaled": rows_scaled,
    "a row filled": row_filled,
    "a column set to zero": column_zeroed,
    "used before and after": used_before_and_after,
    "a view taken before": view_taken_before,
    "a buffer written twice": buffer_written_twice,
}


def model_of(forward: Callable[..., Tensor]) -> Formula:
    return Formula(forward, w=numbers(D, D), v=numbers(D))


@pytest.mark.parametrize("size", [1, 3, D])
@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(Case(lambda: model_of(EXACT[name]), of((D,))), size)


@pytest.mark.parametrize("name", EXACT)
def test_values_are_those_of_the_plain_model(name: str) -> None:
    model, x = model_of(EXACT[name]), numbers(3, D)
    with pergrad.record(model, pergrad.Norms()):
        found = model(x)
        found.sum().backward()
    assert_near(found, model(x))


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "itself": lambda w, v: w.mul_(v),
    "a view": lambda w, v: w[1:].mul_(v),
    "a view of a view": lambda w, v: w.view(2, 2, D)[0].mul_(v),
    "a transposed view": lambda w, v: w.t().mul_(v),
    "an item": lambda w, v: w.__setitem__(0, v),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_is_never_written_to(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        WRITES[name](m.w, m.v)
        return F.linear(x, m.w)

    model = model_of(forward)
    before, value = state_of(model), model.w.detach().clone()
    with pytest.raises(PergradError, match="in place"):
        pergrad.grads(model, lambda m, x: total(m(x)), numbers(3, D))
    assert torch.equal(model.w, value)
    assert state_of(model) == before


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_derived_weight_is_exact_or_refused(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w * 2
        WRITES[name](w, m.v)
        return F.linear(x, w)

    model, x = model_of(forward), numbers(3, D)
    expected = loop_grads(model, lambda m, x: total(m(x)), x)
    try:
        found = pergrad.grads(model, lambda m, x: total(m(x)), x)
    except PergradError as error:
        assert "in place" in str(error)  # noqa: PT017
        assert name not in ("itself", "a view", "an item"), "these are exact"
        return
    for key, rows in expected.items():
        assert_near(found[key], rows, key)
