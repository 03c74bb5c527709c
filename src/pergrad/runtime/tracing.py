"""Steps that are being traced: no number can be looked at, and a compiler rearranges what is computed."""

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
    """Whether the tensor stands for one in a compiled step, and has no values."""
    return isinstance(t, internals.FakeTensor)


# How many steps are being traced that no compiler gets. A second thread that traces one for a compiler takes
# the ways that suit the first: they give the same.
_uncompiled = 0


def is_for_compiler(t: Tensor) -> bool:
    """Whether the tensor stands for one in a step that is traced, and then compiled."""
    return _uncompiled == 0 and is_traced(t)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within, in any thread, what is traced is going to run as it is."""
    global _uncompiled
    _uncompiled += 1
    try:
        yield
    finally:
        _uncompiled -= 1


def operation(
    name: str, result: Callable[..., Any], mutates_args: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Makes a function `torch.ops.pergrad.<name>`, which a compiled step calls; `result` gives its shape.

    Its tags: strides may be whatever the compiler has chosen. Outside of a trace it is called as it is.
    """

    def register(function: Function) -> Function:
        # Not `custom_op`, which takes longer to call a function than most of them take.
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
    """The same; a compiled step has it in memory then, and does not compute it anew wherever it is used."""
    return _copied(t) if is_traced(t) else t
