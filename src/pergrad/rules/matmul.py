"""Rules for matrix products with a weight."""

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
    """Decomposes X @ W and W @ X, for a matrix W, into `F.linear`; stacks of matrices into `bmm`."""
    other = mat2 if other is None else other
    if not isinstance(other, Tensor):
        return NotImplemented
    dims = input.dim(), other.dim()
    if dims[0] >= 2 and dims[1] == 2:
        return F.linear(input, other.t())
    if dims[0] == 2 and dims[1] > 2:
        return F.linear(other.mT, input).mT
    return (
        torch.bmm(input, other) if dims == (3, 3) and len(input) == len(other) else NotImplemented
    )


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
    """∂W_n = Σ_t x[n,t] ⊗ g[n,t],  ∂b_n = Σ_t g[n,t]; GPT-2 writes its linear maps like this."""
    return {
        "input": lambda: PositionSum(grad_output),
        "mat2": lambda: OuterProduct(grad_output, mat1).transposed(),
    }
