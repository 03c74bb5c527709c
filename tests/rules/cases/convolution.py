"""Convolutions and their transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]


def convolution(function: Callable[..., Tensor], dims: int) -> list[Case]:
    def sizes(*values: int) -> tuple[int, ...]:
        return values[:dims]

    def case(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Case:
        return Case(function, (x, w) if b is None else (x, w, b), options)

    space, taps, even = sizes(6, 5, 4), sizes(3, 2, 3), sizes(2, 4, 2)
    x = data(3, 4, *space)
    plain, grouped = weight(6, 4, *taps), weight(6, 2, *taps)
    return [
        case(x, plain, weight(6)),
        case(x, plain),
        case(x, plain, stride=2),
        case(x, plain, stride=sizes(2, 1, 3)),
        case(x, plain, stride=(2,)),
        case(x, plain, padding=1),
        case(x, plain, padding=sizes(1, 0, 2)),
        case(x, plain, padding=(2,)),
        case(x, plain, padding="valid"),
        case(x, plain, padding="same"),
        case(x, weight(6, 4, *even), weight(6), padding="same"),
        case(x, weight(6, 4, *even), padding="same", dilation=sizes(3, 1, 2)),
        case(x, grouped, padding="same", groups=2),
        case(x, plain, padding=1, dilation=2),
        case(x, plain, padding=2, dilation=sizes(1, 2, 1)),
        case(x, grouped, weight(6), groups=2),
        case(x, grouped, groups=2, stride=2, padding=sizes(2, 1, 0)),
        case(x, grouped, groups=2, stride=2, padding=2, dilation=2),
        case(x, weight(4, 1, *taps), groups=4),
        case(x, weight(8, 1, *taps), weight(8), groups=4, padding=1, stride=2),
        case(x, weight(6, 4, *[1] * dims), weight(6)),
        case(x, weight(6, 4, *[1] * dims), stride=2, padding=1),
        case(data(1, 4, *space), plain, weight(6), padding=1),
        case(data(1, 4, *space), grouped, groups=2),
        case(data(4, 4, *[4] * dims), weight(4, 4, *taps), weight(4), padding=1),
        case(data(4, 4, *[4] * dims), weight(4, 1, *taps), groups=4),
        case(data(17, 4, *space), plain, stride=2, dilation=1),
        Case(function, (x, plain, weight(6), 2, 1, 1, 1)),
        Case(function, (x, grouped, None, sizes(1, 2, 1), sizes(2, 1, 1), 2, 2)),
        Case(function, (), {"groups": 2, "weight": grouped, "input": x}, samples=("input",)),
    ]


def transposed_convolution(function: Callable[..., Tensor], dims: int) -> list[Case]:
    def sizes(*values: int) -> tuple[int, ...]:
        return values[:dims]

    def case(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Case:
        return Case(function, (x, w) if b is None else (x, w, b), options)

    x, taps = data(3, 4, *sizes(4, 3, 3)), sizes(3, 2, 2)
    plain, grouped = weight(4, 6, *taps), weight(4, 3, *taps)
    return [
        case(x, plain, weight(6)),
        case(x, plain, stride=2),
        case(x, plain, stride=sizes(2, 1, 3), padding=1),
        case(x, plain, padding=sizes(1, 0, 1)),
        case(x, plain, stride=2, output_padding=1),
        case(x, plain, stride=3, output_padding=sizes(1, 0, 2), padding=(1,)),
        case(x, plain, dilation=2),
        case(x, plain, dilation=sizes(1, 2, 1), stride=(2,)),
        case(x, grouped, weight(6), groups=2),
        case(x, weight(4, 1, *taps), groups=4, stride=2, padding=1, output_padding=1),
        case(x, weight(4, 6, *[1] * dims)),
        case(data(1, 4, *sizes(4, 3, 3)), plain),
        case(data(4, 4, *[4] * dims), weight(4, 4, *taps), weight(4)),
        Case(function, (x, grouped, weight(6), 2, 1, 1, 2, 1)),
    ]


CASES = [
    *convolution(F.conv1d, 1),
    *convolution(F.conv2d, 2),
    *convolution(F.conv3d, 3),
    *transposed_convolution(F.conv_transpose1d, 1),
    *transposed_convolution(F.conv_transpose2d, 2),
    *transposed_convolution(F.conv_transpose3d, 3),
]
