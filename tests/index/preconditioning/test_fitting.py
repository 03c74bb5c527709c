"""A fit sees every sample once, the model's output within its loss, and labels drawn from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.errors import IndexingError
from pergrad.index.preconditioning.fitting import FitData, output_of, sampled
from pergrad.index.rows.computing import RowMaker
from pergrad.testing import assert_near
from tests.index.cases import data, flat_gradients, losses, network

X, Y = data(10).tensors


def batches(size: int) -> Any:
    def made() -> Any:
        for start in range(0, 10, size):
            part = slice(start, start + size)
            yield start, (X[part], Y[part]), len(X[part])

    return made


@pytest.mark.parametrize("size", [3, 10])
def test_all_samples_are_fed_once(size: int) -> None:
    model = network()
    kept: dict[str, Tensor] = {}

    class Adding(pergrad.Sum):
        def end(self) -> None:
            super().end()
            for name, g in self.result.items():
                kept[name] = kept.get(name, 0) + g

    assert FitData(RowMaker([model], losses, "none", 1, 0), batches(size)).run(0, Adding()) == 10
    found = torch.cat([g.flatten() for g in kept.values()])
    assert_near(found, flat_gradients(model, X, Y).sum(0))


def test_the_output_is_that_of_the_only_call() -> None:
    model = network()
    assert torch.equal(output_of(model, losses, (X, Y)), model(X))
    assert not model._forward_hooks

    def twice(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x, y) + losses(model, x, y)

    with pytest.raises(IndexingError, match="calls the model 2 times"):
        output_of(model, twice, (X, Y))
    assert not model._forward_hooks


def test_labels_are_drawn_from_the_predictions() -> None:
    class Sure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 100.0 * F.one_hot(torch.arange(len(x)) % 3, 3).double()

    found = sampled(losses)(Sure(), X, Y)  # whatever the labels are, the model is right
    assert_near(found, torch.zeros(10, dtype=torch.float64))


def test_one_logit_is_drawn_from_a_sigmoid() -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 1), 100.0, dtype=torch.float64)

    loss = lambda model, x, y: F.binary_cross_entropy_with_logits(  # noqa: E731
        model(x)[:, 0], y.double(), reduction="none"
    )
    assert_near(sampled(loss)(One(), X, Y), torch.zeros(10, dtype=torch.float64))


def test_logits_of_another_shape_are_refused() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, None, :]

    with pytest.raises(IndexingError, match=r"shape \(n, classes\), got \(10, 1, 6\)"):
        sampled(lambda model, x, y: model(x).sum((1, 2)))(Deep(), X, Y)

    class Other(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(IndexingError, match="neither a tensor nor logits"):
        sampled(lambda model, x, y: model(x)["x"].sum(1))(Other(), X, Y)
