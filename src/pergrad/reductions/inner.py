"""Computes inner products per sample, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pergrad.reductions.choosing import chooser_of

__all__ = ["INNER_PRODUCT_WAYS", "inner_products", "multiplied_and_summed"]


def inner_products(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b, (n, ...) -> (n,) in float64; a CPU sums in the dtype of the arguments."""
    way = chooser_of(a).pick("inner products of samples")
    return INNER_PRODUCT_WAYS[way](a, b)


def multiplied_and_summed(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b over all dimensions but the samples, summed in float64; `b` may have no sample axis."""
    return (a * b).flatten(1).sum(1, dtype=torch.float64)


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.flatten(1), b.flatten(1)
    return torch.bmm(a.unsqueeze(1), b.unsqueeze(2)).view(-1).double()


INNER_PRODUCT_WAYS = {
    "multiplied and summed": multiplied_and_summed,
    "batched product": _batched_product,
}
