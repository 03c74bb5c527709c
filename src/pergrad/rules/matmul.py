"""Matrix products with a weight on the right, as the linear maps that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import OuterProduct, PositionSum
from pergrad.rules.registry import Gradients, decomposes, implements_per_sample_grads

__all__: list[str] = []


@decomposes(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(input: Tensor, other: Any = None, *, mat2: Any = None) -> Any:
    """X @ W = linear(x, Wᵀ) for a matrix W, and bmm for stacks of them; what is neither is left to others."""
    weight = mat2 if other is None else other
    if isinstance(weight, Tensor) and weight.dim() == 3 == input.dim():
        return torch.bmm(input, weight) if len(input) == len(weight) else NotImplemented
    if not isinstance(weight, Tensor) or weight.dim() != 2 or input.dim() < 2:
        return NotImplemented
    return F.linear(input, weight.t())


def _is_affine(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    """Whether the call is b + x @ W with the samples in the rows of x."""
    scales = arguments.get("beta", 1), arguments.get("alpha", 1)
    return arguments["input"].dim() == 1 and dims.get("mat1") == 0 and scales == (1, 1)


@implements_per_sample_grads(
    torch.addmm,
    Tensor.addmm,
    weights={"input": (), "mat2": ("mat1",)},
    check=_is_affine,
    casts_under_autocast=True,
)
def addmm(
    grad_output: Tensor,  # (n, t, o)
    input: Tensor,  # (o,)
    mat1: Tensor,  # (n, t, i)
    mat2: Tensor,  # (i, o)
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Gradients:
    """∂W_n = Σ_t x[n,t] ⊗ g[n,t],  ∂b_n = Σ_t g[n,t]: a linear map as GPT-2 writes it."""
    return {
        "input": lambda: PositionSum(grad_output),
        "mat2": lambda: OuterProduct(grad_output, mat1).transposed(),
    }
