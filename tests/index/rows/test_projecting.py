"""Projections keep inner products as well as theory promises, also those of gradients of low rank."""

from __future__ import annotations

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.rows.projecting import made_projector

SHAPES = {"w": torch.Size([12, 10]), "b": torch.Size([12])}
CPU = torch.device("cpu")


def gradients(low_rank: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    g = torch.randn(2, 12, 1).double() @ torch.randn(2, 1, 10).double()
    return {
        "w": g if low_rank else torch.randn(2, 12, 10).double(),
        "b": torch.randn(2, 12).double(),
    }


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize(
    ("projection", "factor"), [("count", 11.0), ("rademacher", 2.0), ("normal", 2.0)]
)
def test_errors_of_inner_products_are_those_of_theory(
    projection: str, factor: float, low_rank: bool
) -> None:
    given, dim, seeds = gradients(low_rank), 64, 300
    flat = torch.cat([g.flatten(1) for g in given.values()], 1)
    exact = flat[0] @ flat[1]
    found = []
    for seed in range(seeds):
        rows = made_projector(projection, SHAPES, dim, seed, CPU).projected(given)
        found.append(rows[0] @ rows[1])
    errors = torch.stack(found) - exact
    size = flat[0].norm() * flat[1].norm()
    # Variance at most factor / dim |g|² |h|²: 2 for independent entries, 2 + 3² for a sketch of two hashes.
    assert errors.square().mean() <= 1.3 * factor / dim * size**2
    assert errors.mean().abs() <= 4 * errors.std() / seeds**0.5


def test_two_sided_rows_are_unbiased_and_apart_for_each_parameter() -> None:
    given = gradients(False)
    rows = [
        made_projector("two_sided", SHAPES, 16, seed, CPU).projected(given) for seed in range(400)
    ]
    assert rows[0].shape == (2, 16 + 12)
    products = torch.stack([(r[0, :16] * r[1, :16]).sum() for r in rows])
    exact = (given["w"][0] * given["w"][1]).sum()
    assert (products.mean() - exact).abs() <= 4 * products.std() / 20
    torch.testing.assert_close(rows[0][:, 16:], given["b"])  # small gradients are kept whole


def test_a_projection_is_linear_and_fixed_by_its_seed() -> None:
    given = gradients(False)
    for projection in ("count", "rademacher", "normal", "two_sided", "none"):
        a = made_projector(projection, SHAPES, 16, 3, CPU).projected(given)
        b = made_projector(projection, SHAPES, 16, 3, CPU).projected(
            {n: 2 * g for n, g in given.items()}
        )
        torch.testing.assert_close(2 * a, b)


def test_an_unknown_projection_is_refused() -> None:
    with pytest.raises(IndexingError, match="must be one of 'count'"):
        made_projector("fourier", SHAPES, 16, 0, CPU)


def test_whole_gradients_of_a_large_model_are_refused() -> None:
    with pytest.raises(IndexingError, match="choose another projection"):
        made_projector("none", {"w": torch.Size([20_000, 20_000])}, 16, 0, CPU)
