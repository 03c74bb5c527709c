"""Decomposes attention whose mask contains weights, such as biases of relative positions."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.registry import decomposes
from pergrad.runtime import wide

__all__: list[str] = []


@decomposes(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,  # (..., t, d)
    key: Tensor,  # (..., s, d)
    value: Tensor,  # (..., s, o)
    attn_mask: Tensor | None = None,  # (..., t, s)
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ scale + mask) v, zero for a position that attends to nothing."""
    if enable_gqa:  # several query heads share one head of keys and values
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        t, s = scores.shape[-2:]
        attn_mask = torch.ones(t, s, dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    attends_to_none = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(attends_to_none, 0)
    shares = scores.softmax(-1, dtype=wide(scores.dtype)).masked_fill(attends_to_none, 0)
    return F.dropout(shares.to(value.dtype), dropout_p) @ value
