"""Normalisations, and the activation that has a slope for each channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.normalization import channel_affine
from tests.rules.cases.case import Case, data, variance, weight

__all__ = ["CASES"]


def layer_norm() -> list[Case]:
    x = data(3, 2, 4, 3, 2)
    cases = []
    for rank in (1, 2, 3):
        shape = tuple(x.shape[-rank:])
        w, b = weight(*shape), weight(*shape)
        cases += [
            Case(F.layer_norm, (x, shape, w, b)),
            Case(F.layer_norm, (x, list(shape), w, b, 0.5)),
            Case(F.layer_norm, (x, shape), {"weight": w}),
            Case(F.layer_norm, (x, shape), {"bias": b, "eps": 0.1}),
            Case(F.layer_norm, (x, torch.Size(shape), None, b)),
            Case(F.layer_norm, (data(1, *shape), shape, w, b)),
        ]
    w, b = weight(4), weight(4)
    return [
        *cases,
        Case(F.layer_norm, (data(5, 4), (4,), w, b)),
        Case(F.layer_norm, (data(3, 2, 0), (0,), weight(0), weight(0))),
        Case(F.layer_norm, (data(4, 4, 4), (4,), w, b)),
        Case(F.layer_norm, (data(4, 4, 4), (4, 4), weight(4, 4), weight(4, 4))),
        Case(F.layer_norm, (data(5, 4),), {"eps": 0.2, "bias": b, "normalized_shape": [4]}),
    ]


def rms_norm() -> list[Case]:
    x = data(3, 2, 4, 3, 2)
    shapes = [tuple(x.shape[-rank:]) for rank in (1, 2, 3)]
    w = weight(4)
    return [
        *(Case(F.rms_norm, (x, shape, weight(*shape))) for shape in shapes),
        *(Case(F.rms_norm, (x, list(shape), weight(*shape), 0.5)) for shape in shapes),
        Case(F.rms_norm, (data(5, 4),), {"eps": 0.1, "weight": w, "normalized_shape": (4,)}),
        Case(F.rms_norm, (data(4, 4, 4), (4,), w)),
        Case(F.rms_norm, (data(1, 4), (4,), w)),
    ]


def group_norm() -> list[Case]:
    shapes = [(5, 6), (5, 6, 4), (5, 6, 3, 2), (3, 6, 2, 3, 2), (6, 6, 6), (1, 6, 3)]
    w, b = weight(6), weight(6)
    return [
        *(Case(F.group_norm, (data(*shape), 2, w, b)) for shape in shapes),
        *(Case(F.group_norm, (data(*shape), 1, w)) for shape in shapes),
        Case(F.group_norm, (data(5, 6, 4), 6, w, b)),
        Case(F.group_norm, (data(5, 6, 4), 3, data(6)), {"bias": b}),  # torch needs some weight
        Case(F.group_norm, (data(5, 6, 4), 3, w, b, 0.5)),
        Case(F.group_norm, (data(5, 6, 4),), {"eps": 0.3, "num_groups": 2, "weight": w}),
    ]


def affine() -> list[Case]:
    w, b = weight(4), weight(4)
    shapes = [(5, 4), (5, 4, 3), (4, 4, 4), (2, 4, 3, 2), (2, 4, 2, 3, 2), (1, 4)]
    return [
        *(Case(channel_affine, (data(*shape), w, b)) for shape in shapes),
        Case(channel_affine, (data(5, 4, 3), w, None)),
        Case(channel_affine, (data(5, 4, 3), None, b)),
        Case(channel_affine, (data(5, 4, 3),), {"bias": b, "weight": w}),
    ]


def instance_norm() -> list[Case]:
    cases = []
    for shape in [(5, 4, 6), (3, 4, 3, 2), (2, 4, 2, 3, 2), (4, 4, 4), (1, 4, 3)]:
        x, w, b = data(*shape), weight(4), weight(4)
        mean, var = data(4), variance(4)
        cases += [
            Case(F.instance_norm, (x, None, None, w, b)),
            Case(F.instance_norm, (x, mean, var, w, b)),
            Case(F.instance_norm, (x, mean, var, w, b, False)),
            Case(F.instance_norm, (x, mean, var, w), {"use_input_stats": False, "eps": 0.5}),
            Case(F.instance_norm, (x,), {"bias": b, "eps": 0.5}),
            Case(
                F.instance_norm,
                (x,),
                {"momentum": 0.7, "weight": w, "running_var": var, "running_mean": mean},
            ),
            Case(F.instance_norm, (x, mean, var, w, b, True, 0.3, 0.01)),
        ]
    return cases


def batch_norm() -> list[Case]:
    """Only with running statistics; with those of the batch it is refused."""
    cases = []
    for shape in [(5, 4), (5, 4, 3), (3, 4, 3, 2), (2, 4, 2, 3, 2), (4, 4, 4), (1, 4)]:
        x, mean, var, w, b = data(*shape), data(4), variance(4), weight(4), weight(4)
        cases += [
            Case(F.batch_norm, (x, mean, var, w, b)),
            Case(F.batch_norm, (x, mean, var, w, None, False, 0.3, 0.5)),
            Case(F.batch_norm, (x, mean, var), {"bias": b, "eps": 0.1, "momentum": 0.2}),
        ]
    return cases


def prelu() -> list[Case]:
    shapes = [(5, 4), (5, 4, 3), (2, 4, 3, 2), (4, 4, 4), (1, 4)]
    functions = (F.prelu, Tensor.prelu)
    return [
        *(Case(f, (data(*shape), weight(4))) for f in functions for shape in shapes),
        *(Case(f, (data(*shape), weight(1))) for f in functions for shape in shapes),
        *(Case(f, (data(5, 4),), {"weight": weight(4)}) for f in functions),
        Case(F.prelu, (data(5), weight(1))),
    ]


CASES = [
    *layer_norm(),
    *rms_norm(),
    *group_norm(),
    *affine(),
    *instance_norm(),
    *batch_norm(),
    *prelu(),
]
