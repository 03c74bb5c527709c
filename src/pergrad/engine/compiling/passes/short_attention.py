"""Writes attention over few positions as products and a softmax, for a compiler to fuse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pergrad.rules.attention import shares_of_attention
from pergrad.runtime import internals

__all__ = ["spell_out_short_attention"]

# The CPU's kernel works in tiles and computes scores twice, so that it never holds all of them. Forward and
# backward of 32 heads of size 64 take 4.7 ms by the kernel at 128 positions, and 3.8 ms as compiled products
# and softmax; at 64 positions and 96 heads 4.9 and 3.8 ms; at 512 positions 57 and 78 ms.
_FEW_POSITIONS = 128


def spell_out_short_attention(graph: Graph) -> None:
    """Replaces the calls of the CPU's attention kernel on few positions by what it computes, in place."""
    for node in graph.find_nodes(op="call_function", target=internals.cpu_attention):
        if _is_short(*node.args[:3], **_rest(node, 3)):
            node.target = attention
    for node in graph.find_nodes(op="call_function", target=internals.cpu_attention_backward):
        if _is_short(*node.args[1:4], **_rest(node, 6)):
            node.target = attention_backward


def _rest(node: Node, start: int) -> dict[str, Any]:
    """Returns the kernel's arguments after the tensors, by name."""
    return {**dict(zip(("dropout_p", "is_causal"), node.args[start:], strict=False)), **node.kwargs}


def _is_short(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> bool:
    q, k, v = (x.meta["val"] for x in (query, key, value))
    is_plain = not dropout_p and attn_mask is None and q.shape[:2] == k.shape[:2] == v.shape[:2]
    is_few = max(q.shape[2], k.shape[2]) <= _FEW_POSITIONS
    return is_plain and is_few and q.dtype in (torch.float32, torch.float64)


def attention(
    query: Tensor,  # (n, h, t, d)
    key: Tensor,  # (n, h, s, d)
    value: Tensor,  # (n, h, s, d)
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, and the softmax itself, which the backward gets instead of logsumexp."""
    shares = shares_of_attention(query, key, is_causal=is_causal, scale=scale)
    return _heads_side_by_side(shares @ value), shares


def attention_backward(
    grad_output: Tensor,  # (n, h, t, d)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,  # (n, h, t, d)
    shares: Tensor,  # (n, h, t, s)
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """∂q, ∂k and ∂v."""
    mean = (grad_output * output).sum(-1, keepdim=True)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = shares * (grad_output @ value.mT - mean) * factor
    found = scores @ key, scores.mT @ query, shares.mT @ grad_output
    return tuple(map(_heads_side_by_side, found))  # type: ignore[return-value]


def _heads_side_by_side(x: Tensor) -> Tensor:
    """Lays out (n, h, t, d) as the kernel does: (n, t, h, d) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
