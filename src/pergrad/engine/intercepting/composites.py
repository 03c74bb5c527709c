"""Python functions of torch that check for overrides first: how to run their bodies all the same."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

__all__ = ["is_composite", "without_override_check"]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_composite(func: Callable[..., Any]) -> bool:
    return isinstance(func, types.FunctionType)


@functools.cache
def without_override_check(func: types.FunctionType) -> Callable[..., Any]:
    """The function with its own override check answering no; what it calls is still seen."""
    answers = {name: _never for name in _CHECKS if name in func.__globals__}
    body = types.FunctionType(
        func.__code__,
        {**func.__globals__, **answers},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False
