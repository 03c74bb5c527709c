"""Exact scores are products of whole gradients; candidates are sorted by them."""

from __future__ import annotations

import numpy as np
import torch

from pergrad.audit import Spec
from pergrad.index.preconditioning.base import OnGradients
from pergrad.index.querying.exact import exact_scores, ranked_again
from pergrad.index.querying.scoring import Best
from pergrad.index.rows.computing import RowMaker
from pergrad.testing import assert_near
from tests.index.cases import data, flat_gradients, losses, network

X, Y = data(100).tensors


class Twice(OnGradients):
    def applied(self, gradients: object) -> dict[str, torch.Tensor]:
        return {name: 2 * g for name, g in gradients.items()}  # type: ignore[attr-defined]


def test_scores_are_means_over_checkpoints_of_products() -> None:
    models = [network(seed=1), network()]
    maker = RowMaker(models, losses, "count", 4, 0)  # whatever the projection
    spec = Spec(models[-1], data(100), losses)
    indices = np.arange(100)[::-1][:70].copy()  # more than a batch, in another order
    chosen = torch.from_numpy(indices)
    expected = sum(
        flat_gradients(m, X[:2], Y[:2]) @ flat_gradients(m, X[chosen], Y[chosen]).T for m in models
    )
    assert_near(exact_scores(spec, maker, (X[:2], Y[:2]), None, indices), expected / 2)
    twice = exact_scores(spec, maker, (X[:2], Y[:2]), [Twice(), Twice()], indices)
    assert_near(twice, expected)


def test_candidates_are_sorted_by_exact_scores() -> None:
    best = Best(torch.tensor([[7, 3, 9], [3, 7, 5]]), torch.zeros(2, 3))
    exact = torch.tensor([[1.0, 5.0, 2.0, 4.0], [0.0, -1.0, 3.0, 9.0]])
    place = {3: 0, 5: 1, 7: 2, 9: 3}
    high = ranked_again(best, exact, place, 2, largest=True)
    assert high.rows.tolist() == [[9, 7], [7, 3]]
    assert high.scores.tolist() == [[4.0, 2.0], [3.0, 0.0]]
    low = ranked_again(best, exact, place, 1, largest=False)
    assert low.rows.tolist() == [[3], [5]]
