"""Runs the handler of one call by itself: a handler that gives up is followed by a probe, which hides it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Scope
from pergrad.engine.samples.propagation import Call, handler_of, tensors_in

__all__ = ["Tagged", "answer", "call_of", "described", "named", "of_torch", "rows"]


def of_torch(function: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """A copy of a function that passes for torch's own, whose names say what they do."""
    assert isinstance(function, types.FunctionType)
    own = {**function.__globals__, "__name__": "torch.made_for_a_test"}
    return types.FunctionType(
        function.__code__, own, name or function.__name__, None, function.__closure__
    )


def named(name: str) -> Callable[..., Any]:
    """A function of torch with that name that is never called."""

    def function() -> None: ...

    return of_torch(function, name)


@dataclass(frozen=True, eq=False)
class Tagged:
    """A tensor and where its samples are: (dim, pre, post), or (dim, owners)."""

    value: Tensor
    place: tuple[Any, ...]

    def layout(self, scope: Scope) -> Layout:
        if len(self.place) == 2:
            return Owners(scope, self.place[0], torch.tensor(self.place[1]))
        return scope.samples(*self.place)


def rows(
    *shape: int,
    dim: int = 0,
    pre: int = 1,
    post: int = 1,
    owners: list[int] | None = None,
    of: Tensor | None = None,
) -> Tagged:
    """A tensor with samples along `dim`, with a gradient unless its values are given."""
    value = torch.rand(shape, dtype=torch.float64).requires_grad_() if of is None else of
    return Tagged(value, (dim, pre, post) if owners is None else (dim, owners))


def call_of(
    func: Callable[..., Any],
    *args: Any,
    count: int = 3,
    outputs: list[Tensor] | None = None,
    flows: bool | None = None,
    **kwargs: Any,
) -> Call:
    """The call of `func` on these arguments; it runs unless its outputs are given."""
    scope = Scope(count)
    tagged: dict[int, Layout] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tagged):
            tagged[id(value.value)] = value.layout(scope)
            return value.value
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

    args, kwargs = plain(args), {k: plain(v) for k, v in kwargs.items()}
    outputs = tensors_in(func(*args, **kwargs)) if outputs is None else outputs
    tensors = tensors_in(args, kwargs)
    layouts = [tagged.get(id(t), scope.constant()) for t in tensors]
    return Call(scope, func, args, kwargs, outputs, tensors, layouts, flows)


def described(found: Any) -> Any:
    """A layout, or several, in plain values."""
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list | tuple):
        return [described(layout) for layout in found]
    if isinstance(found, Constant):
        return "constant"
    if isinstance(found, Lost):
        return found.why
    if isinstance(found, Owners):
        return found.dim, found.owner.tolist()
    return found.key


def answer(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The layout by the handler of `func` alone, described."""
    handler = handler_of(func)
    assert handler is not None
    return described(handler(call_of(func, *args, **kwargs)))
