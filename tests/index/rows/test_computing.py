"""Rows at each checkpoint are projections of the gradients, recorded, traced or sample by sample."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import IndexingError
from pergrad.index.rows import computing
from pergrad.index.rows.computing import RowMaker, checked_mask, trained_shapes
from pergrad.testing import assert_near
from tests.index.cases import data, flat_gradients, losses, network

X, Y = data(6).tensors


def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace steps instead of compiling them, which takes long."""
    monkeypatch.setattr(computing, "compiled", partial(pergrad.compiled, backend="eager"))


def test_rows_losses_and_norms_are_those_of_each_checkpoint() -> None:
    models = [network(seed=1), network()]
    found = RowMaker(models, losses, "none", 1, 0).rows((X, Y), 6)
    assert found.owner is None
    for number, model in enumerate(models):
        exact = flat_gradients(model, X, Y)
        assert_near(found.rows[number], exact)
        assert_near(found.norm[:, number], exact.norm(dim=1))
        assert_near(found.loss[:, number], losses(model, X, Y).detach())


@pytest.mark.parametrize("projection", ["count", "two_sided", "none"])
def test_steps_that_are_traced_give_the_same_rows(
    projection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced(monkeypatch)
    model = network()
    plain = RowMaker([model], losses, projection, 16, 0)
    maker = RowMaker([model], losses, projection, 16, 0, compiles=True)
    for batch in range(4):  # as it is, as it is, traced, from the graph
        x, y = data(6, seed=batch).tensors
        found, expected = maker.rows((x, y), 6), plain.rows((x, y), 6)
        assert_near(found.rows[0], expected.rows[0])
        assert_near(found.norm, expected.norm)
        assert_near(found.loss, expected.loss)
    assert maker.why_uncompiled is None
    assert [step.graphs for step in maker._steps.values()] == [1]


def test_a_model_that_cannot_be_traced_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            scale = 2.0 if float(x.detach().sum()) > 1e9 else 1.0
            return self.inner(x) * scale

    model = Branching()
    maker = RowMaker([model], losses, "none", 1, 0, compiles=True)
    for _ in range(4):
        found = maker.rows((X, Y), 6)
    assert "cannot be traced" in (maker.why_uncompiled or "")
    assert_near(found.rows[0], flat_gradients(model, X, Y))


def test_batches_that_are_computed_sample_by_sample_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced(monkeypatch)

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return h - h.mean(0) + h.mean(0)

    model = Mixing()
    maker = RowMaker([model], losses, "none", 1, 0, compiles=True)
    for _ in range(3):
        found = maker.rows((X, Y), 6)
    assert maker.fallback is not None
    assert not maker._steps
    assert_near(found.rows[0], flat_gradients(model, X, Y))


@pytest.mark.parametrize("projection", ["none", "count", "two_sided"])
def test_norms_that_are_estimated_are_the_lengths_of_the_rows(projection: str) -> None:
    model = network()
    exact, rough = (
        RowMaker([model], losses, projection, 64, 0, norms=norms).rows((X, Y), 6)
        for norms in ("exact", "estimated")
    )
    assert_near(exact.norm[:, 0], flat_gradients(model, X, Y).norm(dim=1))
    assert_near(rough.rows[0], exact.rows[0])
    assert_near(rough.norm[:, 0], exact.rows[0].norm(dim=1))
    if projection == "none":
        assert_near(rough.norm, exact.norm)


def test_whole_gradients_are_those_of_the_oracle() -> None:
    model = network()
    found = RowMaker([model], losses, "count", 4, 0).gradients(0, (X, Y), 6)
    joined = torch.cat([g.flatten(1) for g in found.values()], 1)
    assert_near(joined, flat_gradients(model, X, Y))


def test_frozen_parameters_have_no_part_in_a_row() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    assert list(trained_shapes(model)) == ["0.bias", "2.weight", "2.bias"]
    assert RowMaker([model], losses, "none", 1, 0).width == 8 + 24 + 3


def test_a_mask_of_another_shape_is_refused() -> None:
    assert checked_mask(torch.ones(2, 3, dtype=torch.int64), 2).dtype == torch.bool
    for wrong in (torch.ones(3, 2), torch.ones(2), None):
        with pytest.raises(IndexingError, match=r"shape \(2, t\)"):
            checked_mask(wrong, 2)


def test_the_first_samples_are_proved() -> None:
    found = RowMaker([network()], losses, "none", 1, 0).certified((X, Y), 6)
    assert (found["ok"], found["samples"], found["parameters"]) == (True, 6, 4)
