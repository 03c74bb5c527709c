"""Class 10: autograd.Functions that are random, count their calls, or recompute through a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


class RandomMask(torch.autograd.Function):
    """Multiplies by a weight with a random mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        mask = (torch.rand(3, 3) < 0.5).double()
        ctx.save_for_backward(x, w, mask)
        return x @ (w * mask)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, mask = ctx.saved_tensors
        return g @ (w * mask).T, (x.T @ g) * mask


class Recomputing(torch.autograd.Function):
    """Runs a module, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.module, ctx.parameters = module, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.module(x), (x, *ctx.parameters), g, allow_unused=True)
        return (None, *found)


class Counting(torch.autograd.Function):
    """Multiplies by a weight, and counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        Counting.calls += 1
        ctx.save_for_backward(x, w)
        return x @ w * 2.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T * 2.0, x.T @ g * 2.0


@CASES.exact()
def random_function(m: Any, x: Tensor) -> Tensor:
    return RandomMask.apply(m.a(x), m.w)


@CASES.exact()
def recomputes_through_the_module(m: Any, x: Tensor) -> Tensor:
    return x + Recomputing.apply(m.b, m.a(x), *m.b.parameters())


@CASES.exact()
def recomputes_without_parameters(m: Any, x: Tensor) -> Tensor:
    return x + Recomputing.apply(m.b, m.a(x))


@CASES.exact()
def counts_its_calls(m: Any, x: Tensor) -> Tensor:
    return Counting.apply(m.a(x), m.w)
