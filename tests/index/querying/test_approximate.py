"""Approximate search finds nearly all of the best rows, and measures how many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import pergrad
from pergrad.errors import IndexingError
from pergrad.index.querying import approximate
from pergrad.index.querying.approximate import Coarse
from tests.index.cases import built, data, network


def test_approximate_matches_are_the_exact_ones_of_a_small_index() -> None:
    dataset = data(300)
    x, y = dataset.tensors
    options = {
        "projection": "count",
        "dim": 64,
        "dtype": "float16",
        "batch_size": 100,
        "chunk": 100,
    }
    index = built(model=network(), dataset=dataset, preconditioner="second_moment", **options)
    exact = index.query((x[:5], y[:5]), 5)
    near = index.query((x[:5], y[:5]), 5, approximate=True)
    assert exact.recall is None
    assert near.recall is not None
    assert near.recall >= 0.95
    shared = [len({*a} & {*b}) for a, b in zip(exact.helpful, near.helpful, strict=True)]
    assert sum(shared) >= 24
    index.delete(exact.helpful[0].tolist())
    again = index.query((x[:1], y[:1]), 5, approximate=True)
    assert not {*exact.helpful[0].tolist()} & {*again.frame["index"]}
    assert "recall" in str(again)


def small(path: Path, **options: object) -> pergrad.Index:
    given = {"projection": "count", "dim": 64, "dtype": "float16", "batch_size": 100, "chunk": 100}
    return built(path, network(), data(300), **{**given, **options})


def test_scores_of_what_is_found_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "_DIRECTIONS", 4)  # of 64: candidates are rough
    monkeypatch.setattr(approximate, "_FACTORS", (1, 2, 30))
    x, y = data(300).tensors
    for number, options in enumerate(
        (
            {"preconditioner": "second_moment"},
            {"unit_norm": True},
            {"checkpoints": [network(seed=1)]},
        )
    ):
        index = small(tmp_path / str(number), **options)
        queries, lengths = index._asking.queries((x[:20], y[:20]))
        scores = index.scores((x[:20], y[:20]))
        coarse = Coarse(index._store, queries, lengths, {"number": number})
        assert coarse.factor == 30  # few candidates miss too many
        high, low = coarse.best(queries, 10)
        for found in (high, low):
            torch.testing.assert_close(
                found.scores, scores.gather(1, found.rows), rtol=1e-4, atol=1e-6
            )
        exact = scores.topk(10).indices.tolist(), scores.topk(10, largest=False).indices.tolist()
        hits = [
            len({*a} & {*b})
            for own, wanted in zip((high, low), exact, strict=True)
            for a, b in zip(own.rows.tolist(), wanted, strict=True)
        ]
        assert sum(hits) / 400 == pytest.approx(coarse.recall)


def test_the_recall_is_measured_again_for_other_queries_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = small(tmp_path)
    x, y = data(300).tensors
    queries, _ = index._asking.queries((x[:4], y[:4]))
    calls: list[int] = []
    real = Coarse._measured
    monkeypatch.setattr(
        Coarse, "_measured", lambda self, queries: calls.append(1) or real(self, queries)
    )
    for about, count in (({"damping": 1}, 1), ({"damping": 1}, 1), ({"damping": 2}, 2)):
        Coarse(index._store, queries, None, about)
        assert len(calls) == count


def test_damaged_files_are_named(tmp_path: Path) -> None:
    index = small(tmp_path)
    batch = tuple(t[:2] for t in data(300).tensors)
    index.query(batch, 3, approximate=True)
    path = tmp_path / "approximate.f16"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(IndexingError, match="ends too early"):
        index.query(batch, 3, approximate=True)
    path.unlink()
    with pytest.raises(IndexingError, match=r"approximate\.f16 is missing"):
        index.query(batch, 3, approximate=True)


def test_rows_that_are_not_finite_are_never_candidates(tmp_path: Path) -> None:
    x, y = data(300).tensors
    x[7] = torch.nan
    index = built(dataset=TensorDataset(x, y), projection="count", dim=32, chunk=100)
    found = index.query((x[:3], y[:3]), 299, approximate=True)
    assert 7 not in {*found.frame["index"]}


def test_candidates_are_ranked_again_by_whole_gradients() -> None:
    dataset = data(60)
    x, y = dataset.tensors
    model = network()
    for preconditioner in ("none", "ekfac"):
        exact = built(model=model, dataset=dataset, preconditioner=preconditioner)
        expected = exact.query((x[:3], y[:3]), 4)
        options = {"projection": "count", "dim": 32, "dtype": "float16"}
        index = built(model=model, dataset=dataset, preconditioner=preconditioner, **options)
        found = index.query((x[:3], y[:3]), 4, rerank=60)
        assert (found.helpful == expected.helpful).all()
        torch.testing.assert_close(
            torch.from_numpy(found.harmful_scores), torch.from_numpy(expected.harmful_scores)
        )
