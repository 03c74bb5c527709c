"""Class 1: tensors made out of sight, by scripts, vmap, numpy, operators and earlier graphs."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()
OUTSIDE = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))  # of no module


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
    swish_by_script, centred_by_script, product_by_script = map(
        torch.jit.script, (swish, centred, product)
    )
    sine_by_trace = torch.jit.trace(torch.sin, torch.randn(4, 3, dtype=torch.float64))


@torch.library.custom_op("pergrad_tests::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


sine.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Sine(torch.autograd.Function):
    """Computes the sine by numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * torch.from_numpy(np.cos(x.numpy()))


class SineBothWays(Sine):
    """Computes the gradient by numpy too."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.numpy() * np.cos(x.numpy()))


class StandIn:
    """Stands for a tensor, as arrays of other libraries do: torch asks its class what a function does."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def own(value: Any) -> Any:
            return value.value if isinstance(value, StandIn) else value

        return func(*map(own, args), **{k: own(v) for k, v in (kwargs or {}).items()})


@CASES.refused()
def stand_in_that_mixes(m: Any, x: Tensor) -> Tensor:
    return x + m.b(torch.softmax(StandIn(m.a(x)), 0))  # type: ignore[call-overload]


@CASES.refused()
def stand_in_beside_a_tensor(m: Any, x: Tensor) -> Tensor:
    return torch.add(m.b(x), StandIn(m.a(x).flip(0)))  # type: ignore[call-overload]


@CASES.exact()
def stand_in_of_samples(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(StandIn(m.a(x))))  # type: ignore[arg-type]


@CASES.exact()
def stand_in_of_a_weight(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.a(x), StandIn(m.w))  # type: ignore[arg-type]


@CASES.exact()
def scripted(m: Any, x: Tensor) -> Tensor:
    return x + m.b(swish_by_script(m.a(x)))


@CASES.exact()
def vmapped(m: Any, x: Tensor) -> Tensor:
    return x + m.b(torch.vmap(torch.sin)(m.a(x)))


@CASES.exact()
def vmapped_lambda(m: Any, x: Tensor) -> Tensor:
    return x + m.b(torch.vmap(lambda r: r.sin() * r.sum())(m.a(x)))


@CASES.exact()
def vmap_weight_inside(m: Any, x: Tensor) -> Tensor:
    return x + torch.vmap(lambda r: m.b(r))(m.a(x))


@CASES.refused()
def vmap_around_a_known_call(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return h + torch.vmap(lambda c: m.a(x) * c)(torch.ones(2, 3)).sum(0)


@CASES.refused()
def func_grad_around_a_known_call(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return h + torch.func.grad(lambda t: (m.a(x) * t).sum())(x)


@CASES.exact()
def vmap_over_indices_of_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return x + m.b(torch.vmap(lambda n: h[n])(torch.arange(4)))


@CASES.refused()
def vmap_over_indices_of_other_samples(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return x + m.b(torch.vmap(lambda n: h[n])(torch.tensor([1, 0, 3, 2])))


@CASES.exact()
def numpy_forward(m: Any, x: Tensor) -> Tensor:
    return x + m.b(Sine.apply(m.a(x)))


@CASES.exact()
def numpy_both_ways(m: Any, x: Tensor) -> Tensor:
    return x + m.b(SineBothWays.apply(m.a(x)))


@CASES.exact()
def func_grad_inside(m: Any, x: Tensor) -> Tensor:
    return x + m.b(torch.func.vmap(torch.func.grad(lambda r: r.sin().sum()))(m.a(x)))


@CASES.exact(prepare=lambda m, x: setattr(m, "left", nn.Linear(3, 3)(x)))
def left_on_module(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.left)


@CASES.refused(prepare=lambda m, x: setattr(m, "left", m.a(x)))
def left_by_its_own_layer(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.left)


@CASES.exact()
def parameter_of_no_module(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.a.weight @ OUTSIDE)


@CASES.refused()
def scripted_mean(m: Any, x: Tensor) -> Tensor:
    return x + m.b(centred_by_script(m.a(x)))


@CASES.refused()
def scripted_weight(m: Any, x: Tensor) -> Tensor:
    return x + product_by_script(m.a(x), m.w)


@CASES.exact()
def traced(m: Any, x: Tensor) -> Tensor:
    return x + m.b(sine_by_trace(m.a(x)))


@CASES.exact()
def custom_operator(m: Any, x: Tensor) -> Tensor:
    return x + m.b(sine(m.a(x)))


@CASES.refused()
def linearized_layer(m: Any, x: Tensor) -> Tensor:
    """Torch traces it, and a trace has no values to probe with."""
    with warnings.catch_warnings(action="ignore"):  # of torch.jit and torch.fx
        _, tangent = torch.func.linearize(lambda t: m.a(t).tanh(), x)
    return m.b(tangent(torch.ones_like(x)))


@CASES.refused()
def tangent_of_a_layer(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of torch.jit
        return h + torch.func.jvp(m.b, (h,), (torch.ones_like(h),))[1]


@CASES.refused()
def dual_numbers_through_a_layer(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    with (
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),  # of torch.jit
        torch.autograd.forward_ad.dual_level(),
    ):
        dual = torch.autograd.forward_ad.make_dual(h, torch.ones_like(h))
        output, tangent = torch.autograd.forward_ad.unpack_dual(m.b(dual))
    return output + tangent


class Product(torch.autograd.Function):
    """Multiplies by a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


@CASES.exact()
def function_of_a_weight_within_a_mode(m: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return Product.apply(m.a(x), m.w)


@CASES.exact()
def vmap_with_a_weight_within_a_mode(m: Any, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return x + torch.vmap(lambda r: m.b(r))(m.a(x))
