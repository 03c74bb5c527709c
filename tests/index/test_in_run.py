"""In-run values add up dots with the validation gradient, and leave training as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index import InRunValues
from tests.index.cases import data, flat_gradients, losses, network


def trained(
    values: bool, every: int = 1, seed: int = 0
) -> tuple[torch.nn.Module, InRunValues | None, torch.Tensor]:
    """Train some steps; return the model, its values and, for each step, those of the plain loop."""
    model, (x, y) = network(), data(24).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": every, "refresh": 1, "seed": seed}
    kept = InRunValues(model, losses, (x[:4], y[:4]), 24, **options) if values else None
    expected = torch.zeros(6, 24, dtype=torch.float64)
    for number, batch in enumerate(torch.arange(48).view(6, 8) % 24):
        g = flat_gradients(model, x, y)
        expected[number, batch] = 0.1 / 8 * g[batch] @ g[:4].mean(0)
        optimizer.zero_grad()
        if kept is None:
            losses(model, x[batch], y[batch]).mean().backward()
        else:
            with kept.step(batch, lr=0.1):
                losses(model, x[batch], y[batch]).mean().backward()
        optimizer.step()
    return model, kept, expected


def test_values_are_dots_with_the_validation_gradient() -> None:
    _, kept, expected = trained(True)
    assert kept is not None
    torch.testing.assert_close(kept.values, expected.sum(0), rtol=1e-9, atol=1e-12)
    assert kept.counts.tolist() == [2] * 24


def test_one_step_of_each_so_many_is_measured_and_counts_so_often() -> None:
    chosen = set()
    for seed in range(8):
        _, kept, expected = trained(True, every=3, seed=seed)
        assert kept is not None
        steps = [
            (a, 3 + b)
            for a in range(3)
            for b in range(3)
            if torch.allclose(kept.values, 3 * (expected[a] + expected[3 + b]), rtol=1e-9)
        ]
        assert len(steps) == 1
        chosen |= set(steps)
        assert int(kept.counts.sum()) == 16
    assert len(chosen) > 2


def test_samples_in_a_fixed_order_are_all_measured_in_the_end() -> None:
    model, (x, y) = network(), data(24).tensors
    kept = InRunValues(model, losses, (x[:4], y[:4]), 24)
    for _ in range(40):
        for batch in torch.arange(24).view(8, 3):
            with kept.step(batch):
                losses(model, x[batch], y[batch]).mean().backward()
    assert int(kept.counts.min()) > 0


def test_the_validation_gradient_is_computed_again_after_so_many_measured_steps() -> None:
    calls = []

    def counted(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return losses(model, x, y)

    model, (x, y) = network(), data(24).tensors
    kept = InRunValues(model, counted, (x[:4], y[:4]), 24, every=2, refresh=3)
    for _ in range(14):
        with kept.step(range(24)):
            losses(model, x, y).mean().backward()
    assert calls == [4, 4, 4]  # of seven that are measured, the first, fourth and seventh


def test_training_is_not_changed() -> None:
    with_values, without = trained(True)[0], trained(False)[0]
    for a, b in zip(with_values.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_indices_beyond_the_data_are_refused() -> None:
    model, (x, y) = network(), data(24).tensors
    values = InRunValues(model, losses, (x[:4], y[:4]), 24, every=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexingError, match="24 samples"), values.step([24]):
        pass
    for wrong in (torch.tensor([1.5]), [True, False], [[0, 1]]):
        indices: Any = wrong
        with pytest.raises(IndexingError, match="numbers of the samples"), values.step(indices):
            pass
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
