"""Table look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors import RowSum
from pergrad.rules.registry import Gradients, implements_per_sample_grads

__all__: list[str] = []


@implements_per_sample_grads(F.embedding, weights={"weight": ("input",)})
def embedding(
    grad_output: Tensor,  # (n, ..., i)
    input: Tensor,  # (n, ...)
    weight: Tensor,  # (rows, i)
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Gradients:
    """∂W_n[r] = Σ_t g[n,t] [index[n,t] = r]; none for `padding_idx`.

    `scale_grad_by_freq` divides by how often the sample itself has the row. `max_norm` changes the
    table in the forward and nothing here; `sparse` has no meaning for per-sample gradients.
    """
    rows = weight.shape[0]
    index, grads = input.flatten(1), grad_output.flatten(1, -2)
    scale: Tensor | None = None
    if scale_grad_by_freq:
        counts = torch.zeros(len(index), rows, dtype=grads.dtype, device=grads.device)
        counts.scatter_add_(1, index, torch.ones_like(index, dtype=grads.dtype))
        scale = counts.gather(1, index).reciprocal()
    if padding_idx is not None:
        kept = (index != padding_idx % rows).to(grads.dtype)
        scale = kept if scale is None else kept * scale
    return {"weight": RowSum(index, grads if scale is None else grads * scale.unsqueeze(-1), rows)}
