"""Matrix products with a weight on the right, as the linear maps that they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.registry import decomposes

__all__: list[str] = []


@decomposes(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(input: Tensor, other: Any = None, *, mat2: Any = None) -> Any:
    """X @ W = linear(x, Wᵀ) for a matrix W; what is no such product is left to others."""
    weight = mat2 if other is None else other
    if not isinstance(weight, Tensor) or weight.dim() != 2 or input.dim() < 2:
        return NotImplemented
    return F.linear(input, weight.t())


@decomposes(torch.addmm, Tensor.addmm)
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """B + x @ W = linear(x, Wᵀ, b), which is how GPT-2 writes it."""
    if input.dim() != 1 or beta != 1 or alpha != 1:
        return NotImplemented
    return F.linear(mat1, mat2.t(), input)
