"""Class 9: parameters with hooks, made or replaced in the forward, and complex ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


@CASES.exact(prepare=lambda m, x: m.a.weight.register_hook(lambda g: g * 0))
def hook_that_scales(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(prepare=lambda m, x: m.a.weight.register_post_accumulate_grad_hook(lambda p: None))
def hook_after_accumulation(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused()
def layer_made_in_the_forward(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "c"):
        m.c = nn.Linear(3, 3)
    return m.c(m.a(x))


@CASES.refused()
def parameter_made_anew(m: Any, x: Tensor) -> Tensor:
    m.w = nn.Parameter(m.w.detach() * 2)
    return m.a(x) @ m.w


@CASES.refused()
def layer_weight_made_anew(m: Any, x: Tensor) -> Tensor:
    m.a.weight = nn.Parameter(m.a.weight.detach() * 2)
    return m.a(x)


@CASES.exact(parts=lambda: {"cw": nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))})
def complex_parameter(m: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(x.to(torch.complex128) @ m.cw).flatten(1)


@CASES.exact()
def layer_frozen_for_a_while(m: Any, x: Tensor) -> Tensor:
    m.b.requires_grad_(False)
    h = m.b(m.a(x))
    m.b.requires_grad_(True)
    return h + m.b(x)


@CASES.exact()
def weights_as_numbers(m: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch advises to detach them
        return m.a(x) * float(m.w[0, 0]) + m.b(x) * int(m.w.sum() * 10)
