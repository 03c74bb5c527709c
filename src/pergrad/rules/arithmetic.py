"""Rules for sums and products with a weight that is broadcast over samples and positions.

Torch passes the operators on as `Tensor.add` and `Tensor.mul`, either way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pergrad.factors import Dense, ElementProduct, Factor, PositionSum
from pergrad.rules.registry import Gradients, by_shape, implements_per_sample_grads

__all__: list[str] = []


@by_shape
def _weight_is_broadcast(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> bool:
    """Whether one argument carries samples and the other, a tensor, is broadcast over them."""
    a, b = arguments["input"], arguments["other"]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or len(dims) != 1:
        return False
    (name,) = dims
    x, weight = (a, b) if name == "input" else (b, a)
    place = dims[name] - (x.dim() - weight.dim())
    same_dtype = x.dtype == weight.dtype
    return same_dtype and weight.dim() <= x.dim() and (place < 0 or weight.shape[place] == 1)


def _trailing(x: Tensor, shape: torch.Size) -> Tensor | None:
    """Reshapes to (n, t, *shape) if the last dimensions are exactly those of the weight."""
    rank = len(shape)
    if x.dim() <= rank or x.shape[x.dim() - rank :] != shape:
        return None
    positions = x.shape[1 : x.dim() - rank].numel()  # not -1: the weight may have no elements
    return x.reshape(x.shape[0], positions, *shape)


def _summed(grads: Tensor, shape: torch.Size) -> Dense:
    """Sums (n, ...) to (n, *shape)."""
    return Dense(
        grads.sum_to_size(grads.shape[0], *[1] * (grads.dim() - 1 - len(shape)), *shape).reshape(
            grads.shape[0], *shape
        )
    )


@implements_per_sample_grads(
    torch.add,
    Tensor.add,
    weights={"input": (), "other": ()},
    check=_weight_is_broadcast,
    symmetric=True,
)
def add(grad_output: Tensor, input: Tensor, other: Tensor, *, alpha: float = 1) -> Gradients:
    """∂w_n = Σ g over the positions that w is broadcast to."""

    def shift(weight: Tensor, scale: float) -> Factor:
        grads = grad_output if scale == 1 else grad_output * scale
        rows = _trailing(grads, weight.shape)
        return _summed(grads, weight.shape) if rows is None else PositionSum(rows)

    return {"input": lambda: shift(input, 1), "other": lambda: shift(other, alpha)}


@implements_per_sample_grads(
    torch.mul,
    Tensor.mul,
    weights={"input": ("other",), "other": ("input",)},
    check=_weight_is_broadcast,
    symmetric=True,
)
def mul(grad_output: Tensor, input: Tensor, other: Tensor) -> Gradients:
    """∂w_n = Σ g ⊙ x over the positions that w is broadcast to."""

    def scale(weight: Tensor, x: Tensor) -> Factor:
        x = x.expand_as(grad_output)
        g, rows = _trailing(grad_output, weight.shape), _trailing(x, weight.shape)
        if g is None or rows is None:
            return _summed(grad_output * x, weight.shape)
        return ElementProduct(g, rows)

    return {"input": lambda: scale(input, other), "other": lambda: scale(other, input)}
