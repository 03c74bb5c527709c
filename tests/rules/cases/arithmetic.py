"""Sums and products of samples and a broadcast weight, either way round."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]

# Each function and how it is called: torch passes the operators on as the methods.
_CALLS: list[tuple[Callable[..., Any], Callable[..., Any] | None]] = [
    (torch.add, None),
    (Tensor.add, None),
    (Tensor.add, Tensor.__add__),
    (Tensor.add, Tensor.__radd__),
    (torch.mul, None),
    (Tensor.mul, None),
    (Tensor.mul, Tensor.__mul__),
    (Tensor.mul, Tensor.__rmul__),
]
_WEIGHTS = ((4,), (3, 4), (1, 3, 4), (1, 4), (3, 1), (1,), ())

CASES = [
    *(
        Case(function, (data(3, 3, 4), weight(*shape)), call=call)
        for function, call in _CALLS
        for shape in _WEIGHTS
    ),
    *(
        Case(function, (weight(*shape), data(3, 3, 4)), samples=(1,), call=call)
        for function, call in _CALLS
        for shape in _WEIGHTS
    ),
    *(
        Case(function, (data(2, 4), weight(4)), {"alpha": -2.0})
        for function in (torch.add, Tensor.add)
    ),
    Case(torch.add, (weight(4), data(2, 4)), {"alpha": 3.0}, samples=(1,)),
    *(Case(function, (data(3, 2, 0), weight(0))) for function in (torch.add, torch.mul)),
]
