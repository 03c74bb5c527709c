"""Operators for control flow run in Python: the functions in their branches are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop

import pergrad
from pergrad.testing import assert_near
from tests.engine.soundness.judge import Case, squares

Program = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# Torch compiles the operators, with warnings: what they do is written out beside them.
PROGRAMS: dict[str, tuple[Program, Program]] = {
    "of data": (
        lambda m, x: m.b(torch.cond(x.sum() < 1e9, torch.sin, torch.cos, (m.a(x),))),
        lambda m, x: m.b(m.a(x).sin()),
    ),
    "weights in a branch": (
        lambda m, x: torch.cond(x.sum() > 1e9, torch.sin, lambda h: m.b(h), (m.a(x),)),
        lambda m, x: m.b(m.a(x)),
    ),
    "a weight as an operand": (
        lambda m, x: torch.cond(x.sum() < 1e9, lambda h, w: h @ w, lambda h, w: h, (m.a(x), m.w)),
        lambda m, x: m.a(x) @ m.w,
    ),
    "before any weight": (
        lambda m, x: torch.cond(x.sum() < 1e9, lambda h: m.a(h), lambda h: h, (x,)),
        lambda m, x: m.a(x),
    ),
    "loop": (
        lambda m, x: while_loop(
            lambda i, h: i < 2, lambda i, h: (i + 1, m.b(h).sin()), (torch.tensor(0), m.a(x))
        )[1],
        lambda m, x: m.b(m.b(m.a(x)).sin()).sin(),
    ),
}


@pytest.mark.parametrize("size", [4, 3, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_functions_in_branches_are_recorded(name: str, size: int) -> None:
    rows, expected = (
        pergrad.grads(model, squares, *batch)
        for model, batch in (Case(p, "exact", size=size).made() for p in PROGRAMS[name])
    )
    for weight, grad in expected.items():
        assert_near(rows[weight], grad, weight)


def test_a_branch_that_mixes_samples_is_refused() -> None:
    def centred(m: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() < 1e9, lambda h: h - h.mean(0), lambda h: h, (m.a(x),))

    model, batch = Case(centred, "refused").made()
    with pytest.raises(pergrad.PergradError, match="mean"):
        pergrad.norms(model, squares, *batch)
