"""Asking an index: which model answers, what is refused, and what the answers are divided by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.asking import Asking
from pergrad.index.store.store import Store
from pergrad.testing import assert_near
from tests.index.cases import built, data, flat_gradients, network

X, Y = data().tensors


def test_queries_are_rows_at_each_checkpoint_divided_by_nothing() -> None:
    model, early = network(), network(seed=1)
    index = built(model=model, checkpoints=[early])
    queries, lengths = index._asking.queries((X[:3], Y[:3]))
    exact = torch.stack([flat_gradients(m, X[:3], Y[:3]) for m in (early, model)], 1)
    assert_near(queries, exact)
    assert lengths is None


def test_unit_norm_gives_queries_of_length_one_and_lengths_of_rows() -> None:
    index = built(unit_norm=True)  # its folder lives as long
    queries, lengths = index._asking.queries((X[:3], Y[:3]))
    assert_near(queries[:, 0].norm(dim=1), torch.ones(3, dtype=torch.float64))
    exact = flat_gradients(network(), X, Y).norm(dim=1)
    assert lengths is not None
    assert_near(torch.from_numpy(lengths[:, 0]), exact)


@pytest.mark.parametrize("k", [0, -1, 2.0, None])
def test_a_number_of_matches_that_is_none_is_refused(k: object) -> None:
    with pytest.raises(IndexingError, match="k must be a positive integer"):
        built().query((X[:1], Y[:1]), k)  # type: ignore[arg-type]


def test_an_unfinished_store_is_not_asked(tmp_path: Path) -> None:
    built(tmp_path, chunk=8)
    next(iter(sorted((tmp_path / "rows-0").glob("*.npz")))).unlink()
    with pytest.raises(IndexingError, match="32 of 40 samples"):
        Asking(Store(tmp_path))


def test_models_are_attached_once_and_again_after_training() -> None:
    model = network()
    index = built(model=model)
    asking = index._asking
    assert asking.attached() is asking.attached()
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(IndexingError, match="another model"):
        asking.attached()


@pytest.mark.parametrize("given", [{"preconditioner": "second_moment"}, {"unit_norm": True}])
def test_scores_that_are_exact_are_not_ranked_again(given: dict[str, object]) -> None:
    with pytest.raises(IndexingError, match="leave rerank out"):
        built(**given).query((X[:1], Y[:1]), 2, rerank=5)


def test_ranking_again_needs_the_one_data_set(tmp_path: Path) -> None:
    index = built(tmp_path)
    index.append(data(8, seed=3), quiet=True)
    with pytest.raises(IndexingError, match="the one data set"):
        index.query((X[:1], Y[:1]), 2, rerank=5)


def test_a_query_without_a_finite_gradient_is_refused() -> None:
    x, y = data(3, seed=7).tensors
    x[1] = float("nan")
    for preconditioner in ("none", "second_moment", "ekfac"):
        index = built(preconditioner=preconditioner)
        with pytest.raises(IndexingError, match="query 1 has no finite gradient"):
            index.query((x, y), 2)


@pytest.mark.parametrize("wrong", [True, 2.5, "3"])
def test_a_number_of_rows_that_is_no_integer_is_refused(wrong: Any) -> None:
    index, batch = built(), data(3, seed=7).tensors
    with pytest.raises(IndexingError, match="k must be a positive integer"):
        index.query(batch, wrong)
    with pytest.raises(IndexingError, match="count must be from 1 to 40 samples"):
        index.select(batch, wrong)
    with pytest.raises(IndexingError, match="count must be from 0 to 39 samples"):
        index.without_harmful(batch, wrong)
    for indices in (wrong, [wrong]):
        with pytest.raises(IndexingError, match="indices must be a list of integers"):
            index.delete(indices)
    assert len(index) == 40
