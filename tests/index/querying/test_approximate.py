"""Approximate search finds nearly all of the best rows, and measures how many."""

from __future__ import annotations

import torch

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
