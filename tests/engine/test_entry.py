"""`record`, `grads` and `norms`: one call gives what a recorded block gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.errors import ScopeError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import assert_all_near


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def losses(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return data(size, 4), torch.arange(size) % 3


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("is_scalar", [True, False], ids=["scalar loss", "loss of each sample"])
def test_grads_take_a_scalar_or_the_losses_of_the_samples(
    loss_reduction: Any, is_scalar: bool
) -> None:
    model, (x, y) = mlp(), batch()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if is_scalar:
            return F.cross_entropy(model(x), y, reduction=loss_reduction)
        return losses(model, x, y)

    found = pergrad.grads(model, loss, x, y, loss_reduction=loss_reduction)
    assert_all_near(found, loop_grads(model, losses, x, y))


@pytest.mark.parametrize("loss", [lambda m, x: m(x), lambda m, x: 3.0], ids=["(B, 3)", "float"])
def test_loss_of_another_kind_is_refused(loss: Callable[..., Any]) -> None:
    with pytest.raises(pergrad.PergradError, match=r"losses of the samples, \(B,\), or a scalar"):
        pergrad.grads(mlp(), loss, data(4, 4))


@pytest.mark.parametrize("verify", [False, True])
def test_value_of_the_block_is_what_was_asked_for(verify: bool) -> None:
    model, (x, y) = mlp(), batch()
    quantities = pergrad.Grads(), pergrad.Grads()
    with pergrad.record(model, *quantities, verify=verify) as value:
        losses(model, x, y).sum().backward()
    assert value == quantities
    alone = pergrad.Grads()
    with pergrad.record(model, alone, verify=verify) as value:
        losses(model, x, y).sum().backward()
    assert value is alone


def test_norms_are_those_of_the_gradients_over_all_parameters() -> None:
    model, (x, y) = mlp(), batch()
    grads = loop_grads(model, losses, x, y)
    expected = torch.cat([g.flatten(1) for g in grads.values()], 1).norm(dim=1)
    assert_near(pergrad.norms(model, losses, x, y), expected)


@pytest.mark.parametrize("call", [pergrad.grads, pergrad.norms])
def test_options_are_those_of_record(call: Callable[..., Any]) -> None:
    model, (x, y) = mlp(), batch()
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    quantity = pergrad.Grads() if call is pergrad.grads else pergrad.Norms()
    options: dict[str, Any] = {"params": "3.*", "sample_weights": weights}
    with pergrad.record(model, quantity, **options):
        losses(model, x, y).sum().backward()
    torch.testing.assert_close(call(model, losses, x, y, **options), quantity.result)


def of_compiled(model: nn.Module, loss_fn: Any, *batch: Any, **options: Any) -> Any:
    return pergrad.compiled(model, loss_fn, pergrad.Norms(), backend="eager", **options)(*batch)


CALLS = [pergrad.grads, pergrad.norms, of_compiled, pergrad.certify]
CHECKS = [pergrad.verify, pergrad.explain]


@pytest.mark.parametrize("call", [*CALLS, *CHECKS])
def test_loss_function_that_is_none_is_refused_by_name(call: Callable[..., Any]) -> None:
    x, y = batch()
    with pytest.raises(pergrad.PergradError, match=r"loss_fn must be a function.*got Tensor"):
        call(mlp(), x, y)
    with pytest.raises(pergrad.PergradError, match=r"loss_fn must be a function.*got str"):
        call(mlp(), "cross_entropy", x, y)


@pytest.mark.parametrize("call", CALLS)
def test_unknown_option_is_refused_with_those_there_are(call: Callable[..., Any]) -> None:
    x, y = batch()
    with pytest.raises(TypeError, match=r"'targets'\. Options are batch_size, .*by position"):
        call(mlp(), losses, x, targets=y)


@pytest.mark.parametrize("call", [*CALLS, pergrad.verify])
def test_gradients_are_computed_within_no_grad_too(call: Callable[..., Any]) -> None:
    model, given = mlp(), batch()
    expected = call(model, losses, *given)
    with torch.no_grad():
        found = call(model, losses, *given)
    if call in (pergrad.certify, pergrad.verify):
        assert found.ok
    else:
        torch.testing.assert_close(found, expected)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("call", [*CALLS, *CHECKS])
def test_inference_mode_is_refused_by_name(call: Callable[..., Any]) -> None:
    model, given = mlp(), batch()
    with torch.inference_mode(), pytest.raises(ScopeError, match="inference_mode"):
        call(model, losses, *given)
