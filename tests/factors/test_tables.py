"""Sums of positions by row, in every way, against a loop over positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pergrad.factors import sums_by_row
from pergrad.factors.tables import TABLE_SUM_WAYS
from pergrad.runtime import internals
from pergrad.testing import assert_near

WAYS = sorted(TABLE_SUM_WAYS)
# Samples, positions, columns and rows; the last ones are wide, and longer than a piece of a product.
SIZES = [(3, 5, 4, 6), (1, 4, 1, 3), (4, 4, 4, 4), (2, 7, 3, 1), (2, 128, 20, 5), (3, 0, 2, 4)]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def one_by_one(index: Tensor, g: Tensor, rows: int) -> Tensor:
    found = torch.zeros(len(g), rows, g.shape[2], dtype=g.dtype)
    for n in range(len(g)):
        of_sample = index if index.dim() == 1 else index[n]
        for t, row in enumerate(of_sample.tolist()):
            found[n, row] += g[n, t]
    return found


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("columns_last", [True, False])
def test_each_position_is_added_to_its_row(
    way: str, sizes: tuple[int, ...], is_shared: bool, columns_last: bool
) -> None:
    n, t, i, rows = sizes
    index = torch.randint(rows, (t,) if is_shared else (n, t))
    g = numbers(n, t, i) if columns_last else numbers(n, i, t).mT
    found = TABLE_SUM_WAYS[way](index, g, rows, torch.float64)
    assert_near(found, one_by_one(index, g, rows))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_the_type_asked_for(
    way: str, is_shared: bool, half: torch.dtype
) -> None:
    index = torch.randint(2, (1000,) if is_shared else (3, 1000))
    g = (numbers(3, 1000, 4) + 1).to(half)
    found = TABLE_SUM_WAYS[way](index, g, 2, torch.float32)
    assert found.dtype == torch.float32
    exact = one_by_one(index, g.double(), 2)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_not_finite_stay_in_their_sample(way: str) -> None:
    index, g = torch.tensor([0, 1, 1]), numbers(3, 3, 2)
    g[1] = float("inf")
    for of in (index, index.repeat(3, 1)):
        found = TABLE_SUM_WAYS[way](of, g, 2, torch.float64)
        assert not found[1].isfinite().any()
        assert_near(found[[0, 2]], one_by_one(index, g[[0, 2]], 2))


@pytest.mark.parametrize("is_shared", [True, False])
def test_few_rows_are_traced_without_a_scatter(is_shared: bool) -> None:
    index = torch.randint(2, (64,) if is_shared else (3, 64))
    traced = internals.trace(lambda index, g: sums_by_row(index, g, 2, g.dtype))
    graph = traced(index, numbers(3, 64, 4))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any("bmm" in name for name in names)
    assert not [name for name in names if "index" in name or "scatter" in name]
    other, g = index.flip(-1), numbers(3, 64, 4)
    assert_near(graph(other, g), one_by_one(other, g, 2))
