"""Decomposes attention whose mask contains weights, such as biases of relative positions."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.registry import decomposes
from pergrad.runtime import wide

__all__ = ["shares_of_attention"]


def shares_of_attention(
    query: Tensor,  # (..., t, d)
    key: Tensor,  # (..., s, d)
    attn_mask: Tensor | None = None,  # (..., t, s)
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # (..., t, s)
    """softmax(q kᵀ scale + mask), zero for a position that attends to nothing."""
    scores = query @ key.transpose(-2, -1) * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        t, s = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        scores = scores.masked_fill(s > t.unsqueeze(1), -torch.inf)
    if attn_mask is None:
        return scores.softmax(-1, dtype=wide(scores.dtype))
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    else:
        scores = scores + attn_mask
    attends_to_none = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(attends_to_none, 0)
    return scores.softmax(-1, dtype=wide(scores.dtype)).masked_fill(attends_to_none, 0)


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
    """softmax(q kᵀ scale + mask) v."""
    if enable_gqa:  # several query heads share one head of keys and values
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    shares = shares_of_attention(query, key, attn_mask, is_causal=is_causal, scale=scale)
    return F.dropout(shares.to(value.dtype), dropout_p) @ value
