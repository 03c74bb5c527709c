"""Measures the largest tensor that a function allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["largest_tensor"]


class _Sizes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for t in pytree.tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return result


def largest_tensor(function: Callable[[], Any]) -> int:
    """The bytes of the largest tensor that the function makes on its way, its result included."""
    with torch.no_grad(), _Sizes() as sizes:
        function()
    return sizes.largest
