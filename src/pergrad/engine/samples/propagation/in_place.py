"""Maps in-place functions to out-of-place forms, since a weight's value must not be overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.propagation.table import is_own
from pergrad.runtime.caches import cached

__all__ = ["only_moves", "out_of_place", "writes_in_place"]


class _Put:
    """Runs `t[index] = value` on a copy of t. A class, since `is_composite` is True for plain functions."""

    __name__ = "written"

    def __call__(self, t: Tensor, index: Any, value: Any) -> Tensor:
        out = t.clone()
        out[index] = value
        return out


class _Copied:
    """Returns the value of t after `t.copy_(source)`."""

    __name__ = "copied"

    def __call__(self, t: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        return torch.zeros_like(t) + source.to(t.device, t.dtype)


class _OnCopy:
    """Runs an in-place function without an out-of-place form, such as `zero_`, on a copy."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func
        self.__name__ = func.__name__[:-1]

    def __call__(self, t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = t.clone()
        self._func(out, *args, **kwargs)
        return out


_SPECIAL: dict[Any, Callable[..., Any]] = {Tensor.__setitem__: _Put(), Tensor.copy_: _Copied()}


@cached("whether a function writes in place, by function")
def writes_in_place(func: Callable[..., Any]) -> bool:
    name = func.__name__
    if not is_own(func):
        return False
    return func in _SPECIAL or name.startswith("__i") or (name.endswith("_") and name[-2] != "_")


@cached("whether a function changes shape and strides in place, by function")
def only_moves(func: Callable[..., Any]) -> bool:
    """Whether a function changes the shape and the strides of a tensor in place, but no element: `t_`.

    Its out-of-place form returns a view.
    """
    if not writes_in_place(func):
        return False
    return any(
        torch.Tag.inplace_view in operator.tags for operator in _overloads(func.__name__)
    ) and any(operator.is_view for operator in _overloads(func.__name__[:-1]))


def _overloads(name: str) -> list[Any]:
    operator = getattr(torch.ops.aten, name, None)
    return [] if operator is None else [getattr(operator, of) for of in operator.overloads()]


@cached("out-of-place forms, by function")
def out_of_place(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the out-of-place form of `func`; None if `func` does not write to its first argument."""
    if func in _SPECIAL:
        return _SPECIAL[func]
    if not is_own(func):
        return None
    name = func.__name__
    if name.startswith("__i") and name.endswith("__"):
        return getattr(Tensor, f"__{name[3:]}", None)
    if name.endswith("_") and not name.endswith("__"):
        return getattr(Tensor, name[:-1], None) or _OnCopy(func)
    return None
