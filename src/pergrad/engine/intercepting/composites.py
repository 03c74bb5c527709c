"""Runs torch's Python functions, and its operators for control flow, so that what they call is recorded."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pergrad.runtime import internals
from pergrad.runtime.caches import cached

__all__ = [
    "CONTROL_FLOW",
    "checks_overrides",
    "is_composite",
    "run_backward",
    "without_override_check",
]

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_composite(func: Callable[..., Any]) -> bool:
    return isinstance(func, types.FunctionType)


def checks_overrides(func: Callable[..., Any]) -> bool:
    """Whether a Python function asks for overrides by a name that `without_override_check` answers."""
    return isinstance(func, types.FunctionType) and any(
        name in func.__code__.co_names and name in func.__globals__ for name in _CHECKS
    )


class _Globals(dict[str, Any]):
    """Reads the globals of a function as they are now, except for some names."""

    def __init__(self, function: types.FunctionType, changed: dict[str, Any]) -> None:
        super().__init__(changed)
        self._now = function.__globals__

    def __missing__(self, name: str) -> Any:
        return self._now[name]  # the KeyError of a missing name leads on to the builtins


@cached("functions of torch without their override check, by function")
def without_override_check(func: Any) -> Callable[..., Any]:
    """Returns the function with its override check disabled; its inner calls are still intercepted."""
    return _with_globals(func, _Globals(func, _answers(func)))


def run_backward(
    func: Any, mode: TorchFunctionMode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `torch.autograd.backward` or `grad` and intercepts only what the engine calls, as for checkpoints.

    The Python code of torch before that runs outside of `mode`.
    """
    engine = func.__globals__.get(internals.ENGINE)
    if engine is None:
        with mode:
            return without_override_check(func)(*args, **kwargs)

    def run_engine(*given: Any, **named: Any) -> Any:
        with mode:
            return engine(*given, **named)

    # A copy of all globals: `_Globals` would be asked for a dozen of them.
    changed = {**func.__globals__, **_answers(func), internals.ENGINE: run_engine}
    return _with_globals(func, changed)(*args, **kwargs)


@cached("globals that disable the override check of a function, by function")
def _answers(func: types.FunctionType) -> dict[str, Any]:
    """Returns globals that disable the override check of a function."""
    return {name: _never for name in _CHECKS if name in func.__globals__}


def _with_globals(func: types.FunctionType, changed: dict[str, Any]) -> Callable[..., Any]:
    """Copies a function with other globals."""
    body = types.FunctionType(
        func.__code__,
        changed,
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _never(*_: Any) -> bool:
    return False


def _cond(
    predicate: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    return (true_fn if predicate else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    others: Sequence[Any] = (),
) -> Any:
    while cond_fn(*carried, *others):
        carried = body_fn(*carried, *others)
    return carried


# Torch compiles the branches itself, and their backward; within a recording it must not.
CONTROL_FLOW: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}
