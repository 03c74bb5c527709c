"""Sums and products of samples and a broadcast weight, either way round."""

import torch
from torch import Tensor

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]

_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_WEIGHTS = ((4,), (3, 4), (1, 3, 4), (1, 4), (3, 1), (1,), ())

CASES = [
    *(
        Case(function, (data(3, 3, 4), weight(*shape)))
        for function in (*_SUMS, *_PRODUCTS)
        for shape in _WEIGHTS
    ),
    *(
        Case(function, (weight(*shape), data(3, 3, 4)), samples=(1,))
        for function in (*_SUMS, *_PRODUCTS)
        for shape in _WEIGHTS
    ),
    *(
        Case(function, (data(2, 4), weight(4)), {"alpha": -2.0})
        for function in (torch.add, Tensor.add)
    ),
    Case(torch.add, (weight(4), data(2, 4)), {"alpha": 3.0}, samples=(1,)),
]
