"""Rules for linear and bilinear maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.errors import MixedSamplesError, PergradError
from pergrad.factors import OuterProduct, PositionSum
from pergrad.rules.registry import Gradients, by_shape, implements_per_sample_grads

__all__: list[str] = []


@by_shape
def _is_layer(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    """Whether the samples are no features, and the bias has a number for each output."""
    input: Tensor = arguments["input"]
    if dims["input"] >= input.dim() - 1:
        if input.dim() > 1:
            raise MixedSamplesError(
                f"`linear` gets an input of shape {tuple(input.shape)} whose features, its last dimension, "
                "are the samples, so that its outputs mix them: move the samples to another dimension first"
            )
        raise PergradError(
            "Input does not have a batch dimension. Expanded Weights expected input "
            f"of at least rank 2, got of rank {input.dim()}"
        )
    bias = arguments.get("bias")
    return bias is None or bias.shape == arguments["weight"].shape[:1]


@implements_per_sample_grads(
    F.linear,
    weights={"weight": ("input",), "bias": ()},
    check=_is_layer,
    casts_under_autocast=True,
    merges_rows=True,
)
def linear(
    grad_output: Tensor,  # (n, ..., o)
    input: Tensor,  # (n, ..., i)
    weight: Tensor,  # (o, i)
    bias: Tensor | None = None,  # (o,)
) -> Gradients:
    """∂W_n = Σ_t g[n,t] ⊗ x[n,t],  ∂b_n = Σ_t g[n,t]."""
    rows = _positions(grad_output)
    return {
        "weight": lambda: OuterProduct(rows, _positions(input)),
        "bias": lambda: PositionSum(rows),
    }


def _positions(x: Tensor) -> Tensor:  # (n, ..., d) -> (n, t, d)
    return x if x.dim() == 3 else x.flatten(1, -2)


@implements_per_sample_grads(
    F.bilinear, torch.bilinear, weights={"weight": ("input1", "input2"), "bias": ()}
)
def bilinear(
    grad_output: Tensor,  # (n, ..., o)
    input1: Tensor,  # (n, ..., i)
    input2: Tensor,  # (n, ..., j)
    weight: Tensor,  # (o, i, j)
    bias: Tensor | None = None,  # (o,)
) -> Gradients:
    """∂W_n[o,i,j] = Σ_t g[n,t,o] x[n,t,i] y[n,t,j],  ∂b_n = Σ_t g[n,t]."""

    def rows(x: Tensor) -> Tensor:  # (n, t, features); expands an input without samples
        x = x if x.dim() == grad_output.dim() else x.expand(len(grad_output), *x.shape)
        return _positions(x)

    def kernel() -> Tensor:
        return torch.einsum("nto,nti,ntj->noij", rows(grad_output), rows(input1), rows(input2))

    return {"weight": kernel, "bias": lambda: PositionSum(rows(grad_output))}
