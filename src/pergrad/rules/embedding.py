"""Rules for table look-ups."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.errors import PergradError
from pergrad.factors import RowSum
from pergrad.rules.registry import Gradients, decomposes, implements_per_sample_grads
from pergrad.rules.samples import are_samples

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
    """∂W_n[r] = Σ_t g[n,t] [index[n,t] = r], and zero for `padding_idx`.

    `scale_grad_by_freq` divides by how often the row occurs in the sample. `max_norm` changes the table in
    the forward only; `sparse` has no meaning for per-sample gradients.
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


@decomposes(Tensor.__getitem__)
def rows_by_index(table: Tensor, index: Any) -> Any:
    """Decomposes indexing a matrix with integers that carry samples into a look-up."""
    if not isinstance(index, Tensor) or table.dim() != 2 or not table.is_floating_point():
        return NotImplemented
    if index.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return F.embedding(torch.where(index < 0, index + table.shape[0], index), table)


@decomposes(F.embedding_bag, declares_samples=True)
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
    """Looks up rows, then takes the sum, mean or maximum of every bag."""
    if not isinstance(weight, Tensor) or (input.dim() == 1 and offsets is None):
        raise PergradError(
            "embedding_bag: a 1-D input needs `offsets`, the start of each bag; got None"
        )
    kept = torch.ones_like(input, dtype=weight.dtype)
    if offsets is not None:
        index, inside = _bags(len(input), offsets, include_last_offset)
        input, kept = input[index], inside.to(weight.dtype)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights[index]
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is not None:
        kept = kept * (input != padding_idx % weight.shape[0])
    kept = kept.unsqueeze(-1)
    if mode == "max":
        filled = rows.masked_fill(kept == 0, -torch.inf).amax(1)
        return filled.masked_fill(kept.sum(1) == 0, 0)
    total = (rows * kept).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _bags(length: int, offsets: Tensor, include_last_offset: bool) -> tuple[Tensor, Tensor]:
    """Returns the indices of the rows, (bags, longest), and which of them are inside their bag."""
    starts = offsets[:-1] if include_last_offset else offsets
    ends = offsets[1:] if include_last_offset else F.pad(offsets[1:], (0, 1), value=length)
    lengths = ends - starts
    step = torch.arange(max(int(lengths.max()), 1), device=offsets.device)
    first = are_samples(starts).unsqueeze(1)
    inside = step < lengths.unsqueeze(1)
    index = torch.where(
        inside, first + step, first
    )  # outside: any row of the same bag, masked later
    return index.clamp(max=max(length - 1, 0)), inside
