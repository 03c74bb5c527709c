"""Casts data that a model makes floats of itself to the precision in which a step is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["WholeNumbersAs"]


class WholeNumbersAs(TorchFunctionMode):
    """Casts float32 results of functions of whole numbers alone, such as `pixels.float()`, to another dtype.

    Casts of floats are left to the model, which may want float32.

    >>> pixels = torch.tensor([0, 255], dtype=torch.uint8)
    >>> with WholeNumbersAs(torch.float64):
    ...     print(pixels.float().dtype, (pixels / 255).dtype, torch.ones(1).dtype)
    torch.float64 torch.float64 torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.requires_grad:
            return found
        given = [part for part in (*args, *(kwargs or {}).values()) if isinstance(part, Tensor)]
        are_whole = given and not any(t.is_floating_point() or t.is_complex() for t in given)
        return found.to(self._dtype) if are_whole else found
