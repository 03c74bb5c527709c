"""Rules for normalisations with an affine map: the scale has the gradient Σ g ⊙ x̂, the shift Σ g."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pergrad.errors import MixedSamplesError
from pergrad.factors import Dense, ElementProduct, NormalizedProduct, PositionSum, sums_by_groups
from pergrad.factors.choosing import chooser_of
from pergrad.rules.registry import Gradients, by_shape, decomposes, implements_per_sample_grads
from pergrad.rules.samples import LikeFunction, moves
from pergrad.runtime import internals, wide

__all__ = ["channel_affine"]


@by_shape
def _samples_are_not_normalized(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    normalized_shape = tuple(arguments["normalized_shape"])
    if dims["input"] >= arguments["input"].dim() - len(normalized_shape):
        raise MixedSamplesError(
            "Expanded Weights: Layer norm should not normalize over batch dimension for per sample gradient"
            f"computations but got that normalized shape, {normalized_shape}, matched input shape."
        )


@implements_per_sample_grads(
    F.layer_norm,
    weights={"weight": ("input",), "bias": ()},
    check=_samples_are_not_normalized,
    merges_rows=True,
    results=internals.STATISTICS,
)
def layer_norm(
    grad_output: Tensor,  # (n, ..., *normalized_shape)
    input: Tensor,  # (n, ..., *normalized_shape)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    mean: Tensor | None = None,  # (n, ..., 1)
    inverse: Tensor | None = None,  # (n, ..., 1) of 1 / std
) -> Gradients:
    """∂γ_n = Σ_t g ⊙ x̂,  ∂β_n = Σ_t g.

    x̂ is written here, or reductions compute it from the statistics of the forward.
    """
    rows = grad_output.reshape(_by_positions(grad_output, normalized_shape))

    def scale() -> ElementProduct | NormalizedProduct:
        is_left = chooser_of(rows).pick("normalised input") == "left to reductions"
        if is_left and mean is not None and inverse is not None:
            of_rows = (t.reshape(*rows.shape[:2], 1) for t in (mean, inverse))
            return NormalizedProduct(rows, input.reshape(rows.shape), *of_rows)
        normalized = F.layer_norm(input.to(grad_output.dtype), normalized_shape, eps=eps)
        return ElementProduct(rows, normalized.reshape(rows.shape))

    return {"weight": scale, "bias": lambda: PositionSum(rows)}


def _by_positions(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """(n, ..., *normalized_shape) -> (n, t, *normalized_shape), which may have no elements."""
    positions = x.shape[1 : x.dim() - len(normalized_shape)].numel()
    return (x.shape[0], positions, *normalized_shape)


@implements_per_sample_grads(
    F.rms_norm,
    weights={"weight": ("input",)},
    check=_samples_are_not_normalized,
    merges_rows=True,
)
def rms_norm(
    grad_output: Tensor,  # (n, ..., *normalized_shape)
    input: Tensor,  # (n, ..., *normalized_shape)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Gradients:
    """∂γ_n = Σ_t g ⊙ x̂."""

    def scale() -> ElementProduct:
        normalized = F.rms_norm(input, normalized_shape, eps=eps).to(grad_output.dtype)
        shape = _by_positions(input, normalized_shape)
        return ElementProduct(grad_output.reshape(shape), normalized.reshape(shape))

    return {"weight": scale}


def _channels_last(x: Tensor) -> Tensor:
    """(n, r, c, *positions) -> (n, t, c)."""
    return x.flatten(3).movedim(2, -1).flatten(1, 2) if x.dim() > 3 else x


@implements_per_sample_grads(
    F.group_norm,
    weights={"weight": ("input",), "bias": ()},
    results=internals.STATISTICS,
)
def group_norm(
    grad_output: Tensor,  # (n, r, c, *positions)
    input: Tensor,  # (n, r, c, *positions)
    num_groups: int,
    weight: Tensor | None = None,  # (c,)
    bias: Tensor | None = None,  # (c,)
    eps: float = 1e-5,
    mean: Tensor | None = None,  # (n, groups)
    inverse: Tensor | None = None,  # (n, groups) of 1 / std
) -> Gradients:
    """∂γ_n = Σ_t g ⊙ x̂,  ∂β_n = Σ_t g, with x̂ normalised over each group of channels.

    From sums, ∂γ_n = (Σ_t g ⊙ x - mean Σ_t g) / std, without writing x̂.
    """

    def statistics() -> tuple[Tensor, Tensor]:  # (n · r, groups) each
        count = input.shape[0] * input.shape[1]
        if mean is not None and inverse is not None:
            return mean.view(count, num_groups), inverse.view(count, num_groups)
        groups = input.to(grad_output.dtype).reshape(count, num_groups, -1)
        variance, center = torch.var_mean(groups, 2, correction=0)
        return center, (variance + eps).rsqrt()

    can_be_left = mean is not None and grad_output.shape[1] == 1
    has_kernel = input is not None and _torch_has_a_kernel(grad_output)
    way = chooser_of(grad_output).pick("gradients of a group norm", (can_be_left, has_kernel))
    if way == "sums shared with the input's gradient":
        shift = _sum_of_positions(grad_output)
        return {
            "weight": lambda: Dense(_scale_by_sums(grad_output, input, shift, *statistics())),
            "bias": lambda: Dense(shift.sum(1)),
        }
    if way == "sums of torch":
        both = cache(lambda: _scale_and_shift(grad_output, input, *statistics()))
        return {"weight": lambda: Dense(both()[0]), "bias": lambda: Dense(both()[1])}
    rows = _channels_last(grad_output)

    def scale() -> ElementProduct | NormalizedProduct:
        if way == "left to reductions":
            of_groups = (t.unsqueeze(1) for t in statistics())
            return NormalizedProduct(rows, _channels_last(input), *of_groups)
        whole = input.to(grad_output.dtype).flatten(0, 1)
        normalized = F.group_norm(whole, num_groups, eps=eps).view(input.shape)
        return ElementProduct(rows, _channels_last(normalized))

    return {"weight": scale, "bias": lambda: PositionSum(rows)}


def _torch_has_a_kernel(g: Tensor) -> bool:
    """Whether `native_group_norm_backward` computes the sums of each sample at full precision.

    It takes half as long as x̂, its product with g, and two sums.
    """
    return g.dim() > 3 and g.numel() > 0 and g.dtype in (torch.float32, torch.float64)


def _scale_and_shift(
    g: Tensor,  # (n, r, c, *positions)
    x: Tensor,  # (n, r, c, *positions)
    mean: Tensor,  # (n · r, groups)
    inverse: Tensor,  # (n · r, groups)
) -> tuple[Tensor, Tensor]:  # (n, c) each
    """∂γ_n and ∂β_n in one pass, by torch's own backward."""
    rows = g.shape[:3]
    of_rows = (t.to(g.dtype).flatten(0, 1).flatten(2) for t in (g, x))
    statistics = (t.to(g.dtype) for t in (mean, inverse))
    of_scale, of_shift = sums_by_groups(*of_rows, *statistics)
    return of_scale.view(rows).sum(1), of_shift.view(rows).sum(1)


def _sum_of_positions(x: Tensor) -> Tensor:
    """(n, r, c, *positions) -> (n, r, c)."""
    return x.flatten(3).sum(3) if x.dim() > 3 else x


def _scale_by_sums(
    g: Tensor,  # (n, r, c, *positions)
    x: Tensor,  # (n, r, c, *positions)
    shift: Tensor,  # (n, r, c)
    mean: Tensor,  # (n · r, groups)
    inverse: Tensor,  # (n · r, groups)
) -> Tensor:  # (n, c)
    """Σ_r (Σ_t g ⊙ x - mean Σ_t g) / std."""
    n, rows, channels = shift.shape
    mean, inverse = (t.to(g.dtype).view(n, rows, -1, 1) for t in (mean, inverse))
    products = _sum_of_positions(g * x.to(g.dtype))
    products, shift = (t.unflatten(2, (mean.shape[2], -1)) for t in (products, shift))
    return ((products - mean * shift) * inverse).sum(1).reshape(n, channels)


@moves(LikeFunction, F.group_norm)
def channel_affine(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """γ_c x[r, c, ...] + β_c, in the dtype of x: the last step of `instance_norm`."""
    if has_torch_function((input, weight, bias)):
        return handle_torch_function(channel_affine, (input, weight, bias), input, weight, bias)
    shape = [-1] + [1] * (input.dim() - 2)
    output = input
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    return output.to(input.dtype)


@implements_per_sample_grads(channel_affine, weights={"weight": ("input",), "bias": ()})
def _channel_affine(
    grad_output: Tensor,  # (n, r, c, *positions)
    input: Tensor,  # (n, r, c, *positions)
    weight: Tensor | None = None,  # (c,)
    bias: Tensor | None = None,  # (c,)
) -> Gradients:
    """∂γ_n = Σ_t g ⊙ x,  ∂β_n = Σ_t g."""
    return {
        "weight": lambda: ElementProduct(_channels_last(grad_output), _channels_last(input)),
        "bias": lambda: PositionSum(_channels_last(grad_output)),
    }


@decomposes(F.instance_norm)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Decomposes into torch's normalisation, running statistics included, and `channel_affine`."""
    normalized = F.instance_norm(
        input, running_mean, running_var, None, None, use_input_stats, momentum, eps
    )
    return channel_affine(normalized, weight, bias)


@by_shape
def _statistics_are_not_of_the_batch(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    if arguments.get("training", False):
        raise MixedSamplesError(
            "BatchNorm in training mode normalises over the samples of a batch, so no sample has a "
            "gradient of its own: call .eval() on the module, or use nn.GroupNorm instead"
        )


@implements_per_sample_grads(
    F.batch_norm,
    weights={"weight": ("input", "running_mean", "running_var"), "bias": ()},
    check=_statistics_are_not_of_the_batch,
)
def batch_norm(
    grad_output: Tensor,  # (n, r, c, *positions)
    input: Tensor,  # (n, r, c, *positions)
    running_mean: Tensor | None,  # (c,)
    running_var: Tensor | None,  # (c,)
    weight: Tensor | None = None,  # (c,)
    bias: Tensor | None = None,  # (c,)
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Gradients:
    """∂γ_n = Σ_t g ⊙ x̂,  ∂β_n = Σ_t g, with x̂ normalised by the running statistics.

    x̂ is written here, or left to reductions.
    """
    rows = _channels_last(grad_output)

    def scale() -> ElementProduct | NormalizedProduct:
        is_left = chooser_of(rows).pick("normalised input") == "left to reductions"
        if is_left and running_mean is not None and running_var is not None:
            mean, variance = (t.to(wide(t.dtype)) for t in (running_mean, running_var))
            both = (t.expand(len(rows), 1, -1) for t in (mean, (variance + eps).rsqrt()))
            return NormalizedProduct(rows, _channels_last(input), *both)
        whole = input.to(grad_output.dtype).flatten(0, 1)
        normalized = F.batch_norm(whole, running_mean, running_var, eps=eps).view(input.shape)
        return ElementProduct(rows, _channels_last(normalized))

    return {"weight": scale, "bias": lambda: PositionSum(rows)}
