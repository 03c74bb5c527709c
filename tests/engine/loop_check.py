"""The comparison that the contract's tests share: grad_sample against a loop over samples."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pergrad
from pergrad.testing import loop_grads

Reduction = Literal["sum", "mean"]
EXACT = {"rtol": 1e-9, "atol": 1e-11}  # float64


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weighted(model: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
    """Sum each sample's output under a cotangent of its own: (B,)."""
    return (model(x) * cotangent).flatten(1).sum(1)


def cotangent_of(model: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.no_grad():
        output = model(*args)
    return torch.randn_like(output)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_grad_samples(model: nn.Module, expected: dict[str, Tensor]) -> None:
    assert trainable(model).keys() == expected.keys()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
        if not parameter.requires_grad:
            assert getattr(parameter, "grad_sample", None) is None, name
            continue
        got = parameter.grad_sample  # type: ignore[attr-defined]
        assert got.dtype == parameter.dtype, name
        assert got.device == parameter.device, name
        assert not got.requires_grad, name
        assert got.shape == (expected[name].shape[0], *parameter.shape), name
        assert_close(got, expected[name], **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def reduce(losses: Tensor, loss_reduction: Reduction) -> Tensor:
    return losses.mean() if loss_reduction == "mean" else losses.sum()


def check(
    model: nn.Module, x: Tensor, loss_reduction: Reduction = "sum", *, needs_grad: bool = False
) -> None:
    """Compare output, grad_sample and the input's gradient with the loop and a plain backward."""
    x = x.detach().requires_grad_(needs_grad)
    cotangent = cotangent_of(model, x)
    expected = loop_grads(model, weighted, x.detach(), cotangent)

    wrapped = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    output = wrapped(x)
    assert_close(output, model(x), **EXACT)
    losses = (output * cotangent).flatten(1).sum(1)
    reduce(losses, loss_reduction).backward()
    assert_grad_samples(model, expected)
    if needs_grad:
        plain = reduce(weighted(model, x, cotangent), loss_reduction)
        (plain_grad,) = torch.autograd.grad(plain, x)
        assert_close(x.grad, plain_grad, **EXACT)
