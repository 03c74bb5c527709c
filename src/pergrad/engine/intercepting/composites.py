"""Runs torch's Python functions, and its operators for control flow, so that what they call is recorded."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pergrad.errors import UnsupportedFunctionError
from pergrad.runtime import internals
from pergrad.runtime.caches import cached
from pergrad.runtime.containers import map_parts, parts_of, refilled

__all__ = [
    "CONTROL_FLOW",
    "checks_overrides",
    "is_composite",
    "run_backward",
    "watched",
    "without_override_check",
]

_READING = frozenset(["LOAD_GLOBAL", "LOAD_NAME"])
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

    # Not `_Globals`, which would be asked for a dozen of them, nor a copy of all.
    now = func.__globals__
    changed = {name: now[name] for name in _names_read(func.__code__) if name in now}
    changed.update(_answers(func))
    changed[internals.ENGINE] = run_engine
    return _with_globals(func, changed)(*args, **kwargs)


@cached("names of globals and builtins that a function reads, by its code")
def _names_read(code: types.CodeType) -> tuple[str, ...]:
    own = {i.argval for i in dis.get_instructions(code) if i.opname in _READING}
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(sorted(own.union(*map(_names_read, inner))))


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


def _map(function: Callable[..., Any], xs: Sequence[Tensor], others: Sequence[Any] = ()) -> Any:
    return _stacked([function(*row, *others) for row in zip(*map(torch.unbind, xs), strict=True)])


def _scan(
    combine: Callable[..., Any],
    carried: Sequence[Any],
    xs: Sequence[Tensor],
    others: Sequence[Any] = (),
) -> Any:
    """Returns the last carry and the stacked outputs; one flat tuple if the function returns one."""
    count = len(carried)
    found: Any = ()
    made: list[Any] = []
    for row in zip(*map(torch.unbind, xs), strict=True):
        found = combine(*carried, *row, *others)
        is_pair = len(found) == 2 and len(parts_of(found[0])) == count
        carried = parts_of(found[0]) if is_pair else found[:count]
        made.append(found[1] if is_pair else tuple(found[count:]))
    return (found[0], _stacked(made)) if is_pair else (*carried, *_stacked(made))


def _stacked(found: Sequence[Any]) -> Any:
    """Stacks the results of all steps, leaf by leaf."""
    steps = zip(*map(parts_of, found), strict=True)
    return refilled(found[0], [torch.stack(s) if isinstance(s[0], Tensor) else s[0] for s in steps])


def watched(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    described: Callable[[Tensor], str | None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Watches the functions that an operator is given: a recorded tensor that one closes over is an error.

    Run eagerly, the operator would drop its gradient. `described` says what a recorded tensor is.
    """
    given = {id(t) for t in parts_of((args, kwargs)) if isinstance(t, Tensor)}
    mode = _Watch(func, lambda t: None if id(t) in given else described(t))

    def wrapped(part: Any) -> Any:
        if not callable(part) or isinstance(part, Tensor | type | torch.fx.GraphModule):
            return part

        @functools.wraps(part)
        def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
            with mode:
                return part(*inner_args, **inner_kwargs)

        return run

    return map_parts(wrapped, (args, kwargs))


class _Watch(TorchFunctionMode):
    def __init__(self, func: Any, described: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self._func = func
        self._described = described

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in parts_of((args, kwargs)):
            found = self._described(t) if isinstance(t, Tensor) and t.requires_grad else None
            if found is not None:
                raise UnsupportedFunctionError(
                    f"`{self._func.__module__}.{self._func.__name__}` runs a function that uses {found} "
                    "without getting it as an argument, and would drop its gradient: pass it as an "
                    "argument of the operator, or write the operator out in Python"
                )
        return func(*args, **(kwargs or {}))


# Torch compiles the branches itself, and their backward; within a recording it must not. Run eagerly, it
# drops the gradients of whatever the functions close over.
CONTROL_FLOW: dict[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.while_loop: _while_loop,
}
