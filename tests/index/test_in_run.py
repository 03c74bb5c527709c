"""In-run values add up dots with the validation gradient, and leave training as it is."""

from __future__ import annotations

import copy

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index import InRunValues
from tests.index.cases import data, flat_gradients, losses, network


def trained(
    values: bool, every: int = 1
) -> tuple[torch.nn.Module, torch.Tensor | None, torch.Tensor]:
    """Train some steps; return the model, its values and those of the plain loop."""
    model, (x, y) = network(), data(24).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = InRunValues(model, losses, (x[:4], y[:4]), 24, every=every) if values else None
    expected = torch.zeros(24, dtype=torch.float64)
    for number, batch in enumerate(torch.arange(24).view(3, 8)):
        if number % every == 0:
            g = flat_gradients(model, x, y)
            expected[batch] += every * 0.1 / 8 * g[batch] @ g[:4].mean(0)
        optimizer.zero_grad()
        if kept is None:
            losses(model, x[batch], y[batch]).mean().backward()
        else:
            with kept.step(batch, lr=0.1):
                losses(model, x[batch], y[batch]).mean().backward()
        optimizer.step()
    return model, None if kept is None else kept.values, expected


@pytest.mark.parametrize("every", [1, 2])
def test_values_are_dots_with_the_validation_gradient(every: int) -> None:
    _, values, expected = trained(True, every)
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)


def test_training_is_not_changed() -> None:
    with_values, without = trained(True)[0], trained(False)[0]
    for a, b in zip(with_values.parameters(), without.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_indices_beyond_the_data_are_refused() -> None:
    model, (x, y) = network(), data(24).tensors
    values = InRunValues(model, losses, (x[:4], y[:4]), 24)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexingError, match="24 samples"), values.step([24]):
        pass
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
