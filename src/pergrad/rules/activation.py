"""Rules for activations with parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import ElementProduct
from pergrad.rules.registry import Gradients, implements_per_sample_grads

__all__: list[str] = []


@implements_per_sample_grads(F.prelu, torch.prelu, Tensor.prelu, weights={"weight": ("input",)})
def prelu(
    grad_output: Tensor,  # (n, r, c, *positions)
    input: Tensor,  # (n, r, c, *positions)
    weight: Tensor,  # (c,) or (1,)
) -> Gradients:
    """∂a_n[c] = Σ_t g[n,t,c] min(x[n,t,c], 0); a single slope sums over the channels too."""
    below = input.to(grad_output.dtype).clamp(max=0)
    if tuple(weight.shape) in ((), (1,)):
        one = (len(input), -1, *weight.shape)
        return {"weight": lambda: ElementProduct(grad_output.reshape(one), below.reshape(one))}

    def positions(x: Tensor) -> Tensor:  # (n, t, c)
        return x.flatten(3).movedim(2, -1).flatten(1, 2) if x.dim() > 3 else x

    return {"weight": lambda: ElementProduct(positions(grad_output), positions(below))}
