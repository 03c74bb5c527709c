"""Operators for control flow run in Python: the functions in their branches are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
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
    "map over samples": (
        lambda m, x: m.b(x) + torch_map(lambda row: m.a(row).sin(), x),
        lambda m, x: m.b(x) + m.a(x).sin(),
    ),
    "map over columns": (
        lambda m, x: (
            torch_map(lambda c, w: {"c": c[0] * c[1] * w}, (m.a(x).T, x.T), m.w[0, 0])["c"].T
        ),
        lambda m, x: m.a(x) * x * m.w[0, 0],
    ),
    "scan over columns": (
        lambda m, x: (
            scan(lambda c, column: (c + m.w[0, 0] * column, 2 * c), m.a(x)[:, 0], x.T)[1].T
        ),
        lambda m, x: (
            2 * torch.stack([m.a(x)[:, 0] + m.w[0, 0] * x[:, :t].sum(1) for t in (0, 1, 2)], 1)
        ),
    ),
    "scan with two carries": (
        lambda m, x: scan(
            lambda c, column: ((c[0] + column, c[1] * column), c[0]),
            (m.a(x)[:, 0], m.b(x)[:, 0]),
            x.T,
        )[0][1][:, None],
        lambda m, x: (m.b(x)[:, 0] * x.prod(1))[:, None],
    ),
}
if torch.__version__ >= "2.12":  # before, results were stacked along the first dimension
    PROGRAMS |= {
        "scan along a dimension": (
            lambda m, x: scan(
                lambda c, column: (c + m.w[0, 0] * column, 2 * c), m.a(x)[:, 0], x, dim=1
            )[1],
            lambda m, x: (
                2 * torch.stack([m.a(x)[:, 0] + m.w[0, 0] * x[:, :t].sum(1) for t in (0, 1, 2)], 1)
            ),
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


def test_a_function_that_mixes_in_a_map_is_refused() -> None:
    def centred(m: Any, x: Tensor) -> Tensor:
        return torch_map(lambda row, mean: row - mean, m.a(x), m.a(x).mean(0))

    model, batch = Case(centred, "refused").made()
    with pytest.raises(pergrad.PergradError, match="mean"):
        pergrad.norms(model, squares, *batch)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (lambda m, x: m.b(x) + hints_wrapper(lambda t: m.a(t), (x,), {}, hints={}), "'a.weight'"),
        (
            lambda m, x: (lambda h: h + hints_wrapper(lambda t: t * h, (x,), {}, hints={}))(m.a(x)),
            "a tensor of shape",
        ),
    ],
    ids=["a parameter", "an activation"],
)
def test_an_operator_of_a_function_that_closes_over_recorded_tensors_is_refused(
    program: Program, named: str
) -> None:
    """Such operators drop the gradients of what they are not given."""
    model, batch = Case(program, "refused").made()
    with pytest.raises(pergrad.PergradError, match=f"hints_wrapper.*{named}"):
        pergrad.norms(model, squares, *batch)
