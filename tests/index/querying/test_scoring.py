"""Scores are products with all rows, whatever the blocks; the best of blocks are the best of all."""

from __future__ import annotations

import pytest
import torch

from pergrad.index.querying import scoring
from pergrad.index.querying.scoring import Best, best_of, merged, score_blocks
from pergrad.testing import assert_near
from tests.index.cases import built, data, flat_gradients, network

X, Y = data().tensors


def queries() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 83, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("block", [1, 3000, 2**22])
def test_scores_do_not_depend_on_the_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_BLOCK", block)
    index = built(model=network(), checkpoints=[network(seed=1)], chunk=16)
    index.delete([2, 30])
    kept = [n for n in range(40) if n not in (2, 30)]
    rows = torch.stack([flat_gradients(network(seed=s), X, Y)[kept] for s in (1, 0)], 1)
    expected = torch.einsum("qck,nck->qn", queries(), rows) / 2
    found = torch.cat([scores for _, scores in score_blocks(index._store, queries())], 1)
    assert_near(found, expected)
    lengths = rows.norm(dim=2)
    each = torch.einsum("qck,nck->qnc", queries(), rows) / lengths
    found = torch.cat([s for _, s in score_blocks(index._store, queries(), lengths.numpy())], 1)
    assert_near(found, each.mean(2))
    high, low = best_of(index._store, queries(), 4)
    assert torch.equal(high.rows, expected.topk(4).indices)
    assert torch.equal(low.rows, expected.topk(4, largest=False).indices)
    assert_near(high.scores, expected.topk(4).values)


def test_more_than_there_are_gives_all() -> None:
    index = built()
    high, low = best_of(index._store, queries()[:, :1], 99)
    assert high.rows.shape == low.rows.shape == (3, 40)
    assert torch.equal(high.rows.flip(1).sort(1).values, torch.arange(40).expand(3, 40))


def test_merging_keeps_the_best_and_of_equals_the_first() -> None:
    best = Best(torch.tensor([[4, 2]]), torch.tensor([[5.0, 1.0]]))
    numbers, scores = torch.tensor([[8, 9, 10]]), torch.tensor([[1.0, 7.0, -3.0]])
    high = merged(best, numbers, scores, 3, largest=True)
    assert high.rows.tolist() == [[9, 4, 2]]
    low = merged(best, numbers, scores, 2, largest=False)
    assert low.rows.tolist() == [[10, 2]]
