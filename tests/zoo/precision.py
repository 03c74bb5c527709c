"""Runs a model in float64 throughout: the default dtype, and what its code casts to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pergrad.engine.intercepting.composites import without_override_check

__all__ = ["InDouble", "default_dtype"]


class InDouble(TorchFunctionMode):
    """Within: what the model's code casts to float32 is cast to float64.

    Rounding to float32 blows the last bit of a float64 up to 1e-7, in the loop as anywhere else.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def raised(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func in (
            Tensor.backward,
            torch.autograd.backward,
        ):  # in which a checkpoint runs its forward again
            with self:
                return without_override_check(func)(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        given = {} if kwargs is None else kwargs
        return func(*map(raised, args), **{key: raised(value) for key, value in given.items()})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
