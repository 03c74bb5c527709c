"""Rules for convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pergrad.errors import MixedSamplesError, PergradError
from pergrad.factors import Convolution, PositionSum
from pergrad.rules.registry import Gradients, by_shape, implements_per_sample_grads

__all__: list[str] = []


def _input_is_batched(function: Callable[..., Tensor], rank: int) -> Callable[..., bool | None]:
    def check(arguments: Mapping[str, Any], dims: Mapping[str, int]) -> None:
        input: Tensor = arguments["input"]
        if input.dim() == rank and dims["input"] != 0:
            raise MixedSamplesError(
                f"`{function.__name__}` takes dimension {dims['input']} of an input of shape "
                f"{tuple(input.shape)} for channels or positions, but it has the samples: put them in "
                "dimension 0"
            )
        if input.dim() != rank:
            raise PergradError(
                f"Expanded Weights only support convolution with batched input, got {function} with an"
                f"unbatched input of dim {input.dim()}, expected input of dim {rank}"
            )

    return by_shape(check)


def _each(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


def _padding(
    padding: str | int | Sequence[int], taps: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Returns (before, after) for each spatial dimension; "same" puts an odd element after."""
    if padding == "valid":
        return ((0, 0),) * len(taps)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, taps, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    assert not isinstance(padding, str), (
        f"torch accepts only 'valid' and 'same' as strings, got {padding!r}"
    )
    return tuple((p, p) for p in _each(padding, len(taps)))


def convolution(
    grad_output: Tensor,  # (n, r, o, *out)
    input: Tensor,  # (n, r, c, *space)
    weight: Tensor,  # (o, c / groups, *taps)
    bias: Tensor | None = None,  # (o,)
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Gradients:
    """∂W_n = the cross-correlation of x[n] with g[n],  ∂b_n = Σ_p g[n,o,p]."""

    def kernel() -> Convolution:
        return _kernel(grad_output, input, weight.shape, stride, padding, dilation, groups)

    return {"weight": kernel, "bias": lambda: _shift(grad_output)}


def _kernel(
    grad_output: Tensor,
    input: Tensor,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Convolution:
    """Builds the factor, with every option expanded to all spatial dimensions."""
    taps = kernel[2:]
    dilations = _each(dilation, len(taps))
    return Convolution(
        grad_output,
        input,
        tuple(kernel),
        _each(stride, len(taps)),
        _padding(padding, taps, dilations),
        dilations,
        groups,
    )


def _shift(grad_output: Tensor) -> PositionSum:
    return PositionSum(grad_output.flatten(3).movedim(2, -1).flatten(1, 2))


for _function, _rank in ((F.conv1d, 3), (F.conv2d, 4), (F.conv3d, 5)):
    implements_per_sample_grads(
        _function,
        weights={"weight": ("input",), "bias": ()},
        check=_input_is_batched(_function, _rank),
        casts_under_autocast=True,
    )(convolution)


def transposed_convolution(
    grad_output: Tensor,  # (n, r, o, *out)
    input: Tensor,  # (n, r, c, *space)
    weight: Tensor,  # (c, o / groups, *taps)
    bias: Tensor | None = None,  # (o,)
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Gradients:
    """∂W_n = the kernel gradient of the convolution from grad_output to the input,  ∂b_n = Σ_p g[n,o,p]."""

    def kernel() -> Convolution:
        x = input.to(grad_output.dtype)
        return _kernel(x, grad_output, weight.shape, stride, padding, dilation, groups)

    return {"weight": kernel, "bias": lambda: _shift(grad_output)}


for _transpose, _rank in (
    (F.conv_transpose1d, 3),
    (F.conv_transpose2d, 4),
    (F.conv_transpose3d, 5),
):
    implements_per_sample_grads(
        _transpose,
        weights={"weight": ("input",), "bias": ()},
        check=_input_is_batched(_transpose, _rank),
        casts_under_autocast=True,
    )(transposed_convolution)
