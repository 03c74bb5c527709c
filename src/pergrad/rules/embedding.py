"""Table look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.factors import RowSum
from pergrad.rules.registry import Gradients, decomposes, implements_per_sample_grads

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


@decomposes(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up, then sum, average or take the largest of every bag."""
    if not isinstance(weight, Tensor) or (input.dim() == 1 and offsets is None):
        raise PergradError("embedding_bag: 1-D input needs the offsets of its bags")
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    kept = torch.ones_like(input, dtype=rows.dtype)
    if padding_idx is not None:
        kept = (input != padding_idx % weight.shape[0]).to(rows.dtype)
    if offsets is not None:
        rows, kept = _bags(rows, kept, offsets, include_last_offset)
    kept = kept.unsqueeze(-1)
    if mode == "max":
        filled = rows.masked_fill(kept == 0, -torch.inf).amax(1)
        return filled.masked_fill(kept.sum(1) == 0, 0)
    total = (rows * kept).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _bags(
    rows: Tensor, kept: Tensor, offsets: Tensor, include_last_offset: bool
) -> tuple[Tensor, Tensor]:
    """Flat rows, and which of them count, as (bags, longest, ...), short bags padded with zeros."""
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat(
        [offsets[1:], offsets.new_tensor([len(rows)])[: len(starts) - len(offsets) + 1]]
    )
    lengths = ends - starts
    longest = max(int(lengths.max()), 1)
    step = torch.arange(longest, device=offsets.device)
    index = (starts.unsqueeze(1) + step).clamp(max=len(rows) - 1)
    inside = (step < lengths.unsqueeze(1)).to(rows.dtype)
    return rows[index], kept[index] * inside
