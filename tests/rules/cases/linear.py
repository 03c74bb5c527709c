"""Linear maps and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.recurrence import linear_over_steps
from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]


def linear() -> list[Case]:
    shapes = [(5, 4), (5, 3, 4), (5, 2, 3, 4), (2, 3, 2, 2, 4), (4, 4, 4), (1, 4), (3, 1, 4)]
    x, w, b = data(5, 3, 4), weight(6, 4), weight(6)
    return [
        *(Case(F.linear, (data(*shape), weight(6, 4), weight(6))) for shape in shapes),
        *(Case(F.linear, (data(*shape), weight(4, 4))) for shape in shapes),
        Case(F.linear, (x, w, None)),
        Case(F.linear, (x,), {"bias": b, "weight": w}),
        Case(F.linear, (x, w), {"bias": b}),
        Case(F.linear, (), {"bias": b, "weight": w, "input": x}, samples=("input",)),
        Case(F.linear, (), {"weight": w, "input": x}, samples=("input",)),
        Case(F.linear, (x, data(6, 4), b)),  # the weight is no parameter at all
    ]


def stand_ins() -> list[Case]:
    def call(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            known = F.linear(x, w, b)
        return linear_over_steps(x, w, b, known)

    x, y, w, b = data(5, 4), data(5, 3, 4), weight(6, 4), weight(6)
    given = {"input": x, "weight": w, "bias": b, "like": data(5, 6)}
    return [
        Case(linear_over_steps, args, {}, (0,), call, given)
        for args in [(x, w), (y, w), (x, w, b), (y, w, b), (y, data(6, 4), b)]
    ]


def bilinear() -> list[Case]:
    w, b = weight(5, 3, 4), weight(5)

    def case(x: Tensor, y: Tensor, b: Tensor | None) -> Case:
        return Case(F.bilinear, (x, y, w) if b is None else (x, y, w, b), samples=(0, 1))

    return [
        case(data(6, 3), data(6, 4), b),
        case(data(6, 3), data(6, 4), None),
        case(data(4, 2, 3), data(4, 2, 4), b),
        case(data(1, 3), data(1, 4), b),
        case(data(3, 5, 2, 3), data(3, 5, 2, 4), None),
    ]


def matrix_products() -> list[Case]:
    w = weight(4, 6)
    methods = [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm]
    cases = []
    for function in methods:
        shapes = [(5, 4), (4, 4), (1, 4)]
        if "mm" not in function.__name__:
            shapes += [(5, 3, 4), (2, 3, 2, 4)]
        cases += [Case(function, (data(*shape), w)) for shape in shapes]
    return [
        *cases,
        Case(torch.matmul, (data(5, 4),), {"other": w}),
        Case(torch.matmul, (data(5, 3, 4), weight(4))),  # a vector
        Case(torch.matmul, (data(5, 3, 4), weight(5, 4, 2)[:1].detach().requires_grad_())),
        Case(torch.matmul, (weight(6, 4), data(5, 4, 3)), samples=(1,)),  # from the left
        *(Case(f, (data(5, 4),), {"mat2": w}) for f in (torch.mm, Tensor.mm)),
    ]


def stacks() -> list[Case]:
    """Each row goes through every matrix: the samples are rows."""
    x, w, b = data(5, 2, 3, 4), weight(2, 4, 6), weight(2, 1, 6)

    def of(function: Any, **options: float) -> Callable[..., Tensor]:
        def call(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            rows = x.transpose(0, 1).flatten(1, 2)
            found = function(rows, w) if b is None else function(b, rows, w, **options)
            return found.unflatten(1, x.shape[::2][:2]).transpose(0, 1)

        return call

    products = [torch.bmm, Tensor.bmm, torch.matmul]
    sums: list[tuple[Any, dict[str, float]]] = [
        (torch.baddbmm, {}),
        (torch.baddbmm, {"beta": 0.5, "alpha": 2.0}),
        (Tensor.baddbmm, {"beta": 0.5, "alpha": 2.0}),
    ]
    given = {"input": b, "batch1": x, "batch2": w}
    return [
        *(Case(f, (x, w), {}, (0,), of(f), {"input": x, "mat2": w}) for f in products[:2]),
        *(Case(f, (data(2, 2, 2, 4), w), {}, (0,), of(f), {"input": x}) for f in products[2:]),
        *(Case(f, (x, w, b), {}, (0,), of(f, **o), {**given, **o}) for f, o in sums),
    ]


def added_products() -> list[Case]:
    x, w, b = data(5, 4), weight(4, 6), weight(6)
    cases = []
    for f in (torch.addmm, Tensor.addmm):
        cases += [
            Case(f, (b, x, w), samples=(1,)),
            Case(f, (b, x, w), {"alpha": 0.5}, samples=(1,)),
            Case(f, (b, x, w), {"beta": 2.0}, samples=(1,)),
            Case(f, (b,), {"mat2": w, "mat1": x}, samples=("mat1",)),
            Case(f, (data(6), x, w), samples=(1,)),
            Case(f, (weight(1, 6), x, w), samples=(1,)),
            Case(f, (data(5, 6), x, w), samples=(0, 1)),
        ]
    return cases


CASES = [
    *linear(),
    *stand_ins(),
    *bilinear(),
    *matrix_products(),
    *added_products(),
    *stacks(),
]
