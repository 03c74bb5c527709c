"""Scores without a store are those of an index in which nothing is projected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index import scores_without_store
from tests.index.cases import built, data, losses, network


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preconditioner": "ekfac"},
        {"preconditioner": "gauss_newton"},
        {"checkpoints": [network(seed=1)], "preconditioner": "ekfac", "labels": "sampled"},
    ],
)
def test_scores_are_those_of_an_index(options: dict[str, Any]) -> None:
    model, dataset = network(), data()
    x, y = dataset.tensors
    stored = built(
        model=model, dataset=dataset, batch_size=8, **{"preconditioner": "none", **options}
    )
    found = scores_without_store(model, dataset, (x[:3], y[:3]), losses, batch_size=8, **options)
    torch.testing.assert_close(found, stored.scores((x[:3], y[:3])), rtol=1e-8, atol=1e-10)


def test_the_second_moment_of_rows_is_refused() -> None:
    with pytest.raises(IndexingError, match="needs rows"):
        scores_without_store(
            network(), data(), data().tensors, losses, preconditioner="second_moment"
        )


def test_a_query_of_another_shape_is_refused() -> None:
    with pytest.raises(IndexingError, match="does not fit"):
        scores_without_store(
            network(), data(), (torch.zeros(1, 5).double(), torch.zeros(1).long()), losses
        )
