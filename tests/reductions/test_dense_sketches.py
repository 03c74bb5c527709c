"""Dense projections are products with one matrix, whatever the factor, the bound and the piece."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from pergrad.factors import Dense, OuterProduct
from pergrad.reductions.dense_sketches import DenseSketch, dense_sketch


@pytest.mark.parametrize("kind", ["rademacher", "normal"])
@pytest.mark.parametrize("bound", [1, 2000, 10**9])
def test_all_ways_multiply_by_one_matrix(kind: Literal["rademacher", "normal"], bound: int) -> None:
    torch.manual_seed(0)
    factor = OuterProduct(torch.randn(5, 3, 7).double(), torch.randn(5, 3, 9).double())
    sketch = DenseSketch("w", (7, 9), 16, 0, kind)
    matrix = torch.cat([part for _, part in sketch.pieces(0, 63)]).double()
    expected = factor.materialize().flatten(1) @ matrix
    torch.testing.assert_close(dense_sketch([factor], sketch, bound), expected)
    kept = DenseSketch("w", (7, 9), 16, 0, kind, kept={})
    torch.testing.assert_close(dense_sketch([Dense(factor.materialize())], kept, bound), expected)


def test_normal_numbers_have_the_moments_of_a_normal_distribution() -> None:
    sketch = DenseSketch("w", (400, 100), 16, 1, "normal")
    values = torch.cat([part for _, part in sketch.pieces(0, 40_000)]).double() * 4
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.square().mean()) - 1) < 0.02
    assert abs(float(values.pow(4).mean()) - 3) < 0.1
