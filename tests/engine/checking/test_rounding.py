"""Reruns that round otherwise: their noise has the size of rounding, and of terms that cancel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.engine.checking.attribution import Judge
from pergrad.engine.checking.replays import LossReplay
from pergrad.engine.checking.rounding import noise_of_sums
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from tests.engine.exactness import Formula, numbers

SIZE, D = 5, 4


def noise(
    model: nn.Module, x: Tensor, loss: Callable[..., Tensor] | None = None, **options: Any
) -> dict[str, float]:
    loss = loss or (lambda m, x: (m(x) + 0.5).pow(2).sum(1))
    replay = LossReplay(model, loss, (x,), Options(), Snapshot(model), SIZE)
    parameters = dict(model.named_parameters())
    scales = dict.fromkeys(parameters, 1.0)
    weights = torch.linspace(1, 2, SIZE, dtype=torch.float64)
    return noise_of_sums(replay, weights, parameters, Judge(x.dtype), scales, **options)


def test_the_noise_of_a_layer_has_the_size_of_rounding() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        found = noise(nn.Linear(D, D).to(dtype), numbers(SIZE, D).to(dtype))
        eps = torch.finfo(dtype).eps
        assert all(eps / 100 < error < 300 * eps for error in found.values())


def test_the_noise_of_terms_that_cancel_has_their_size() -> None:
    model = Formula(lambda m, x: m.n(x), n=nn.LayerNorm(D)).double()
    found = noise(model, 1e3 * torch.ones(SIZE, D, dtype=torch.float64))
    assert 1e-13 < found["n.weight"] < 1e-8  # the gradient itself is zero


def test_a_relu_that_rounding_opens_is_seen_by_repeated_forward_passes_alone() -> None:
    model = Formula(lambda m, x: m.b(m.a(x)).relu(), a=nn.Linear(D, D), b=nn.Linear(D, D)).float()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
        model.b.bias.fill_(-20.0)  # b(a(1)) is zero
    x = torch.ones(SIZE, D)
    assert noise(model, x)["b.bias"] < 1e-3
    assert noise(model, x, forwards=True)["b.bias"] > 0.1


def test_the_model_and_its_inputs_are_left_as_they_were() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Dropout(), nn.Linear(D, D)), torch.rand(SIZE, D)
    before = [p.clone() for p in model.parameters()], x.clone()
    data = [p.data_ptr() for p in model.parameters()]
    noise(model, x, forwards=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[0], strict=True))
    assert [p.data_ptr() for p in model.parameters()] == data
    assert torch.equal(x, before[1])
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_an_error_in_the_middle_leaves_the_parameters_as_they_were() -> None:
    model, calls = nn.Linear(D, D), []

    def fails_in_the_third_run(m: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("in the middle")
        return (m(x) + 0.5).pow(2).sum(1)

    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="in the middle"):
        noise(model, torch.rand(SIZE, D), fails_in_the_third_run, forwards=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_noise_of_a_model_that_uses_transforms_of_torch_func_is_found() -> None:
    slope = torch.vmap(torch.func.grad(lambda row: row.sin().sum()))
    model = Formula(lambda m, x: slope(m.a(x)), a=nn.Linear(D, D)).double()
    found = noise(model, numbers(SIZE, D))
    assert all(1e-18 < error < 1e-12 for error in found.values())


def test_errors_of_the_model_itself_are_not_hidden() -> None:
    def fails(m: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        noise(nn.Linear(D, D), torch.rand(SIZE, D), fails)
