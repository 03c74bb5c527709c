"""Attention with weights: in its mask, and anywhere else."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]


def _attention() -> list[Case]:
    function, sequences = F.scaled_dot_product_attention, (0, 1, 2)
    q, k, v = data(5, 2, 3, 4), data(5, 2, 6, 4), data(5, 2, 6, 3)
    few = data(5, 1, 6, 4), data(5, 1, 6, 3)
    bias = weight(1, 2, 3, 6)
    blocked = bias.detach().masked_fill(torch.arange(6) > 3, -torch.inf)
    blocked[:, 1, 2] = -torch.inf  # attends to none
    allowed = data(3, 6) > -0.5
    return [
        Case(function, (q, k, v, bias), samples=sequences),
        Case(function, (q, k, v, weight(3, 6)), {"scale": 0.3}, sequences),
        Case(function, (q, k, v), {"attn_mask": blocked.requires_grad_()}, sequences),
        Case(function, (q, *few, bias), {"enable_gqa": True}, sequences),
        Case(function, (q, weight(2, 6, 4), v), {"is_causal": True}, (0, 2)),
        Case(function, (weight(2, 3, 4), k, v, allowed), {}, (1, 2)),
    ]


CASES: list[Case] = _attention()
