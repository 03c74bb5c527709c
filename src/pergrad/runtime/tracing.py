"""Tells whether a step is being traced: tensors have no values, and a compiler may reorder operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pergrad.runtime import internals

__all__ = ["computed_once", "is_for_compiler", "is_traced", "operation", "without_compiler"]

Function = TypeVar("Function", bound=Callable[..., Any])
_library = torch.library.Library("pergrad", "DEF")


def is_traced(t: Tensor) -> bool:
    """Whether the tensor belongs to a trace and has no values."""
    return isinstance(t, internals.FakeTensor)


# Number of running traces that will not be compiled. It is global: a thread that traces for a compiler
# meanwhile makes the same choices, which gives the same results.
_uncompiled = 0


def is_for_compiler(t: Tensor) -> bool:
    """Whether the tensor belongs to a trace that will be compiled."""
    return _uncompiled == 0 and is_traced(t)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Declares that traces within the block, in any thread, will run uncompiled."""
    global _uncompiled
    _uncompiled += 1
    try:
        yield
    finally:
        _uncompiled -= 1


def operation(
    name: str, result: Callable[..., Any], mutates_args: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Registers a function as `torch.ops.pergrad.<name>` for compiled steps; `result` is its fake kernel.

    The function must accept any strides: the compiler chooses them. Outside of a trace it is called directly.
    """

    def register(function: Function) -> Function:
        # Not `torch.library.custom_op`: its overhead per call exceeds the time of most of these functions.
        schema = name + torch.library.infer_schema(function, mutates_args=mutates_args)
        _library.define(schema, tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))
        for device in ("CUDA", "CPU"):
            _library.impl(name, function, device)
        torch.library.register_fake(f"pergrad::{name}", result, lib=_library)
        op: Any = getattr(torch.ops.pergrad, name).default

        @wraps(function)
        def call(*arguments: Any) -> Any:
            first = arguments[0]
            traced = is_traced(first if isinstance(first, Tensor) else first[0])
            return op(*arguments) if traced else function(*arguments)

        return cast(Function, call)

    return register


@operation("computed_once", torch.empty_like)
def _copied(t: Tensor) -> Tensor:
    return t.clone()


def computed_once(t: Tensor) -> Tensor:
    """Returns `t`; a compiled step stores it instead of recomputing it at every use."""
    return _copied(t) if is_traced(t) else t
