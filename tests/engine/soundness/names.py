"""Class 7: functions of the user with the names of functions of torch."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function, wrap_torch_function

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


def overriding(function: Any) -> Any:
    """Lets modes and subclasses override a function, as torch does with its own."""

    def call(x: Tensor, *args: Tensor) -> Any:
        if has_torch_function((x, *args)):
            return handle_torch_function(call, (x, *args), x, *args)
        return function(x, *args)

    call.__name__ = call.__qualname__ = function.__name__
    return call


@overriding
def gelu(x: Tensor) -> Tensor:
    return x - x.mean(0)


@overriding
def linear(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).cumsum(0)


@overriding
def detach(x: Tensor) -> Tensor:
    return x * 2


@overriding
def size(x: Tensor) -> Tensor:
    return x * 2


@overriding
def item(x: Tensor) -> Tensor:
    return x - x.mean(0)


class silu(torch.autograd.Function):  # noqa: N801 - the name of torch's function
    """Subtracts the mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


@wrap_torch_function(lambda x: (x,))
def softplus(x: Tensor) -> Tensor:
    return x - x.mean(0)


@wrap_torch_function(lambda x: (x,))
def sigmoid(x: Tensor) -> Tensor:
    return x * x.sin()


@wraps(F.relu)
def relu(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        return handle_torch_function(relu, (x,), x)
    return x - x.mean(0)


@CASES.refused()
def decorated_by_torch(m: Any, x: Tensor) -> Tensor:
    return x + m.b(softplus(m.a(x)))


@CASES.exact()
def decorated_by_torch_and_apart(m: Any, x: Tensor) -> Tensor:
    return x + m.b(sigmoid(m.a(x)))


@CASES.exact()
def decorated_by_torch_and_given_data(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(sigmoid(x)))


@CASES.refused()
def wraps_a_function_of_torch(m: Any, x: Tensor) -> Tensor:
    return x + m.b(relu(m.a(x)))


@CASES.refused()
def user_gelu(m: Any, x: Tensor) -> Tensor:
    return m.b(gelu(m.a(x)))


@CASES.refused()
def user_silu_function(m: Any, x: Tensor) -> Tensor:
    return m.b(silu.apply(m.a(x)))


@CASES.refused()
def user_linear(m: Any, x: Tensor) -> Tensor:
    return x + linear(m.a(x), m.w)


@CASES.exact()
def user_detach(m: Any, x: Tensor) -> Tensor:
    return x + m.b(detach(m.a(x)))


@CASES.exact()
def user_size(m: Any, x: Tensor) -> Tensor:
    return x + m.b(size(m.a(x)))


@CASES.refused()
def user_item(m: Any, x: Tensor) -> Tensor:
    return x + m.b(item(m.a(x)))
