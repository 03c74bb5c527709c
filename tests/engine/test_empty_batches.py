"""An empty batch gives empty rows and sums of zeros, and leaves `.grad` alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.errors import BatchSizeError
from tests.quantities.oracle import NAMES, losses, quantity


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
    ).double()


def rows(count: int) -> Tensor:
    return torch.randn(count, 2, 4, dtype=torch.float64)


def shapes(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: tuple(t.shape) for name, t in result.items()}
    return tuple(result.shape)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("variance", "noise")])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_rows_are_empty_and_sums_are_zero(name: str, reduction: str) -> None:
    model = net()
    before = torch.ones_like(model[0].weight)
    model[0].weight.grad = before
    parameters = dict(model.named_parameters())
    found, other = (quantity(name, parameters) for _ in range(2))
    with pergrad.record(model, found):
        out = model(rows(0))
        F.cross_entropy(out, torch.zeros(0, dtype=torch.long), reduction=reduction).backward()
    with pergrad.record(model, other):
        losses(model, rows(3)).sum().backward()
    assert found.samples == 0
    of_three = shapes(other.result)
    if isinstance(of_three, dict) and name != "grads":
        assert shapes(found.result) == of_three
        assert not any(t.any() for t in found.result.values())
    elif isinstance(of_three, dict):
        assert shapes(found.result) == {key: (0, *shape[1:]) for key, shape in of_three.items()}
    else:
        last = of_three[1:] if name != "gram" else (0,)
        assert shapes(found.result) == (0, *last)
    assert model[0].weight.grad is before
    assert bool((before == 1).all())
    assert model[0].bias.grad is None


@pytest.mark.parametrize("make", [pergrad.Variance, pergrad.NoiseScale])
def test_moments_of_no_samples_are_not_defined_but_can_be_added_to(make: Any) -> None:
    model, found = net(), make(accumulate=True)
    for count in (0, 3, 0):
        with pergrad.record(model, found):
            losses(model, rows(count)).sum().backward()
        if found.samples == 0:
            with pytest.raises(pergrad.PergradError, match="of 0 samples is not defined"):
                _ = found.result
    assert found.samples == 3
    assert found.result


def test_single_calls_take_empty_batches() -> None:
    model = net()
    assert pergrad.norms(model, losses, rows(0)).shape == (0,)
    found = pergrad.grads(model, losses, rows(0))
    assert shapes(found) == {name: (0, *p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_step_takes_empty_batches_between_others(backend: Any) -> None:
    model, norms = net(), pergrad.Norms()
    step = pergrad.compiled(model, losses, norms, backend=backend)
    for count in (0, 2, 0, 2, 2, 0, 0):
        x = rows(count)
        assert step(x).shape == (count,)
        torch.testing.assert_close(norms.result, pergrad.norms(model, losses, x))
    assert step.graphs == 1


def test_kept_gradients_of_an_empty_batch_are_zeros() -> None:
    model = net()
    with pergrad.record(model, pergrad.Norms(), keep_grad=True):
        losses(model, rows(0)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_samples_after_an_empty_batch_in_one_block_are_refused() -> None:
    model = net()
    with (
        pytest.raises(BatchSizeError, match="after an empty one"),
        pergrad.record(model, pergrad.Norms()),
    ):
        (losses(model, rows(0)).sum() + losses(model, rows(2)).sum()).backward()
    losses(model, rows(2)).sum().backward()
    assert model[0].weight.grad is not None


def test_contract_of_torch_refuses_empty_batches() -> None:
    with pytest.raises(BatchSizeError, match="0 is not a valid batch size"):
        pergrad.call_for_per_sample_grads(net())(rows(0))
