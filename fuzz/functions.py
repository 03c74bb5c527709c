"""Functions that programs call, as users write them: autograd.Functions, scripted, compiled, namesakes.

Not annotated like the rest: a reproduction copies their source, and reads better without.
"""
# mypy: ignore-errors

import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

__all__ = ["F", "checkpoint", "nn", "np", "torch"]


def weight(*shape):
    return nn.Parameter(torch.randn(shape) / 2)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s + x * s * (1 - s))


class NumpySin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        return g * torch.from_numpy(np.cos(ctx.saved_tensors[0].detach().numpy()))


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class DroppedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        mask = (torch.rand_like(w) > 0.5).to(w.dtype)
        ctx.save_for_backward(mask)
        return w * mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        inputs = (x, *ctx.module.parameters())
        return None, *torch.autograd.grad(out, inputs, g, allow_unused=True)


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x, flat):
        ctx.module = module
        ctx.save_for_backward(x, flat)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        parameters = tuple(ctx.module.parameters())
        with torch.enable_grad():
            out = ctx.module(x)
        gx, *found = torch.autograd.grad(out, (x, *parameters), g, allow_unused=True)
        pairs = zip(parameters, found, strict=True)
        flat = [torch.zeros_like(p) if f is None else f for p, f in pairs]
        return None, gx, torch.cat([f.flatten() for f in flat])


class DroppedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        mask = (torch.rand_like(w) > 0.5).to(w.dtype)
        ctx.save_for_backward(x, w, mask)
        return x @ (w * mask).T

    @staticmethod
    def backward(ctx, g):
        x, w, mask = ctx.saved_tensors
        gw = g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        return g @ (w * mask), gw * mask


class Centre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class NumpyCentre(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.detach().numpy()
        return torch.from_numpy(x - x.mean(0))

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(0)


class Neighbour(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.roll(1, 0)

    @staticmethod
    def backward(ctx, g):
        return g.roll(-1, 0)


def script(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # deprecated, and still in use
        return torch.jit.script(function)


@script
def scripted_swish(x):
    return x * x.sigmoid()


@script
def scripted_linear(x, w):
    return x.matmul(w).tanh()


@script
def scripted_centre(x):
    return x - x.mean(0)


def gelu(x):
    if has_torch_function_unary(x):
        return handle_torch_function(gelu, (x,), x)
    return x - x.mean(0)


def softplus(x):
    if has_torch_function_unary(x):
        return handle_torch_function(softplus, (x,), x)
    return x.flip(0)


def silu(x):
    if has_torch_function_unary(x):
        return handle_torch_function(silu, (x,), x)
    return x * x.sin()


def swish(x):
    return x * x.sigmoid()


def centred(x):
    return x - x.mean(0)


def squares(h):
    return h.flatten(1).square().sum(1)


compiled_swish = torch.compile(swish, backend="eager")
compiled_centre = torch.compile(centred, backend="eager")
compiled_squares = torch.compile(squares, backend="eager")

torch_attention = F.scaled_dot_product_attention


def doubled_attention(*args, **kwargs):
    return 2 * torch_attention(*args, **kwargs)
