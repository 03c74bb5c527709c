"""Every factor's gradients, against explicit loops over samples and positions."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import (
    ByOwner,
    Convolution,
    Dense,
    ElementProduct,
    Factor,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    RowSum,
    add_up,
)
from pergrad.testing import assert_near

RANDOM = torch.Generator().manual_seed(0)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM, dtype=torch.float64)


def summed(n: int, shape: tuple[int, ...], terms: Callable[[int], list[Tensor]]) -> Tensor:
    """Stack, for every sample, the sum of the terms of its positions."""
    out = torch.zeros(n, *shape, dtype=torch.float64)
    for k in range(n):
        for term in terms(k):
            out[k] += term
    return out


SHAPES = [(3, 5), (1, 4), (4, 1), (3, 3), (2, 0)]  # samples and positions


@pytest.mark.parametrize(("n", "t"), SHAPES)
def test_outer_product_sums_over_positions(n: int, t: int) -> None:
    g, x = data(n, t, 3), data(n, t, 4)
    expected = summed(n, (3, 4), lambda k: [torch.outer(g[k, j], x[k, j]) for j in range(t)])
    assert_near(OuterProduct(g, x).materialize(), expected)


@pytest.mark.parametrize(("n", "t"), SHAPES)
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=str)
def test_position_sum_sums_over_positions(n: int, t: int, shape: tuple[int, ...]) -> None:
    g = data(n, t, *shape)
    assert_near(PositionSum(g).materialize(), summed(n, shape, lambda k: list(g[k])))


@pytest.mark.parametrize(("n", "t"), SHAPES)
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=str)
def test_element_product_sums_over_positions(n: int, t: int, shape: tuple[int, ...]) -> None:
    g, x = data(n, t, *shape), data(n, t, *shape)
    expected = summed(n, shape, lambda k: [g[k, j] * x[k, j] for j in range(t)])
    assert_near(ElementProduct(g, x).materialize(), expected)


@pytest.mark.parametrize(("n", "t"), SHAPES)
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=str)
def test_normalized_product_sums_over_positions(n: int, t: int, shape: tuple[int, ...]) -> None:
    g, x, mean, inverse = data(n, t, *shape), data(n, t, *shape), data(n, t, 1), data(n, t, 1)
    expected = summed(
        n, shape, lambda k: [g[k, j] * (x[k, j] - mean[k, j]) * inverse[k, j] for j in range(t)]
    )
    assert_near(NormalizedProduct(g, x, mean, inverse).materialize(), expected)


@pytest.mark.parametrize(("n", "t"), SHAPES)
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_groups_of_columns_may_have_their_own_statistics(n: int, t: int, groups: int) -> None:
    g, x, mean, inverse = data(n, t, 6), data(n, t, 6), data(n, 1, groups), data(n, 1, groups)
    each = torch.arange(6) // (6 // groups)
    normalized = (x - mean[:, :, each]) * inverse[:, :, each]
    factor = NormalizedProduct(g, x, mean, inverse)
    assert_near(factor.materialize(), (g * normalized).sum(1))
    assert_near(
        factor.part(slice(None), slice(1, 4)).materialize(), (g * normalized).sum(1)[:, 1:4]
    )


def test_one_position_far_from_zero_is_normalized_exactly() -> None:
    g, x, inverse = data(3, 1, 6), data(3, 1, 6), data(3, 1, 1)
    for mean in (data(3, 1, 1) + 1e6, data(3, 1, 2) + 1e6):
        moved = (x + mean.repeat_interleave(6 // mean.shape[2], 2)).float()
        exact = NormalizedProduct(g, moved.double(), mean.float().double(), inverse).materialize()
        factors = NormalizedProduct(g.float(), moved, mean.float(), inverse.float())
        torch.testing.assert_close(factors.materialize().double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "t"), SHAPES)
def test_row_sum_adds_each_position_to_its_row(n: int, t: int) -> None:
    index, g = torch.randint(6, (n, t), generator=RANDOM), data(n, t, 3)
    expected = torch.zeros(n, 6, 3, dtype=torch.float64)
    for k in range(n):
        for j in range(t):
            expected[k, index[k, j]] += g[k, j]
    assert_near(RowSum(index, g, 6).materialize(), expected)


def test_dense_is_what_it_holds() -> None:
    gradients = data(3, 2, 4)
    assert Dense(gradients).materialize() is gradients


def test_factors_of_mixed_precision_have_the_dtype_of_the_gradient() -> None:
    g, x = data(2, 3, 4), data(2, 3, 5).float()
    assert OuterProduct(g, x).materialize().dtype == torch.float64
    assert OuterProduct(g[:, :1], x[:, :1]).materialize().dtype == torch.float64


def test_large_results_are_as_exact_as_small_ones() -> None:
    # Above 32 MiB the result lies in memory that is mapped by hand.
    g, x = data(3, 2, 1024), data(3, 2, 1500)
    whole = OuterProduct(g, x).materialize()
    parts = [OuterProduct(g[:, :, a : a + 256], x).materialize() for a in range(0, 1024, 256)]
    assert_near(whole, torch.cat(parts, 1))
    one = OuterProduct(g[:, :1], x[:, :1]).materialize()
    assert_near(one, g[:, 0, :, None] * x[:, 0, None, :])
    whole.add_(1)  # its memory is its own, and writable
    assert torch.isfinite(whole.sum())


def rows_of(kind: str, rows: int) -> Factor:
    """Make a factor of `rows` rows, each with a gradient of its own."""
    if kind == "outer":
        return OuterProduct(data(rows, 2, 3), data(rows, 2, 4))
    if kind == "outer of one position":
        return OuterProduct(data(rows, 1, 3), data(rows, 1, 4))
    if kind == "position":
        return PositionSum(data(rows, 2, 3))
    if kind == "element":
        return ElementProduct(data(rows, 2, 3), data(rows, 2, 3))
    if kind == "row":
        return RowSum(torch.randint(5, (rows, 2), generator=RANDOM), data(rows, 2, 3), 5)
    if kind == "dense":
        return Dense(data(rows, 3, 2))
    assert kind == "convolution"
    return Convolution(
        data(rows, 1, 3, 4), data(rows, 1, 2, 5), (3, 2, 2), (1,), ((0, 0),), (1,), 1
    )


KINDS = ["outer", "outer of one position", "position", "element", "row", "dense", "convolution"]


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=9))
    ),
)
def test_by_owner_adds_each_row_to_its_sample(kind: str, owned: tuple[int, list[int]]) -> None:
    samples, owners = owned
    factor = rows_of(kind, len(owners))
    each = factor.materialize()
    expected = torch.zeros(samples, *each.shape[1:], dtype=torch.float64)
    for owner, row in zip(owners, each, strict=True):
        expected[owner] += row
    got = ByOwner(factor, torch.tensor(owners), samples).materialize()
    assert_near(got, expected)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "convolution"])
def test_by_owner_of_no_rows_is_zero(kind: str) -> None:
    factor = rows_of(kind, 0)
    got = ByOwner(factor, torch.empty(0, dtype=torch.long), 3).materialize()
    assert got.shape == (3, *factor.materialize().shape[1:])
    assert not got.any()


@pytest.mark.parametrize(("samples", "owners"), [(3, [2, 0, 2, 2, 0]), (1, [0, 0]), (4, [3])])
def test_by_owner_pads_outer_products_to_the_sum_that_adding_rows_gives(
    samples: int, owners: list[int]
) -> None:
    owner = torch.tensor(owners)
    products = rows_of("outer", len(owners))
    padded = ByOwner(products, owner, samples).materialize()
    added = ByOwner(Dense(products.materialize()), owner, samples).materialize()
    assert_near(padded, added)


def uses_of_one_weight() -> dict[str, Factor]:
    """Make one use of a (3, 4) weight by 2 samples, of every kind that can have that shape."""
    owner = torch.tensor([1, 0, 1])
    return {
        "outer": OuterProduct(data(2, 5, 3), data(2, 5, 4)),
        "outer of one position": OuterProduct(data(2, 1, 3), data(2, 1, 4)),
        "outer in lower precision": OuterProduct(data(2, 2, 3), data(2, 2, 4).float()),
        "position": PositionSum(data(2, 5, 3, 4)),
        "element": ElementProduct(data(2, 5, 3, 4), data(2, 5, 3, 4)),
        "normalized": NormalizedProduct(
            data(2, 5, 3, 4), data(2, 5, 3, 4), data(2, 5, 1), data(2, 5, 1)
        ),
        "row": RowSum(torch.tensor([[0, 2], [1, 1]]), data(2, 2, 4), 3),
        "dense": Dense(data(2, 3, 4)),
        "by owner": ByOwner(OuterProduct(data(3, 2, 3), data(3, 2, 4)), owner, 2),
    }


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.sampled_from(sorted(uses_of_one_weight())), min_size=1, max_size=4))
def test_uses_add_up_whatever_their_kinds(kinds: list[str]) -> None:
    factors = [uses_of_one_weight()[kind] for kind in kinds]
    expected = torch.stack([f.materialize() for f in factors]).sum(0)
    assert_near(add_up(factors), expected)


def test_adding_up_leaves_the_factors_as_they_were() -> None:
    first, second = Dense(data(2, 3)), Dense(data(2, 3))
    before = first.gradients.clone()
    add_up([first, second])
    assert torch.equal(first.gradients, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [slice(None), slice(0, 1), slice(1, 3), slice(2, 3)], ids=str)
@pytest.mark.parametrize("samples", [slice(None), slice(0, 2), slice(3, 4)], ids=str)
def test_part_of_a_factor_gives_that_part_of_the_gradients(
    kind: str, samples: slice, rows: slice
) -> None:
    factor = rows_of(kind, 4)
    part = factor.part(samples, rows)
    assert_near(part.materialize(), factor.materialize()[samples, rows])
    assert part.shape == part.materialize().shape
    grouped = ByOwner(factor, torch.tensor([1, 0, 1, 1]), 2)
    assert_near(grouped.part(slice(1, 2), rows).materialize(), grouped.materialize()[1:, rows])


@pytest.mark.parametrize("kind", KINDS)
def test_factor_can_be_summed_in_a_wider_type(kind: str) -> None:
    exact = rows_of(kind, 4)
    coarse = exact.mapped(lambda t: t.bfloat16() if t.is_floating_point() else t)
    exact = coarse.mapped(lambda t: t.double() if t.is_floating_point() else t)
    found = coarse.materialize(torch.float32)
    assert coarse.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert_near(found, exact.materialize().float())


def test_coalesced_rows_are_unique_in_each_sample_and_mean_the_same() -> None:
    index = torch.tensor([[3, 1, 3, 3, 0], [2, 2, 2, 2, 2], [4, 3, 2, 1, 0]])
    factor = RowSum(index, data(3, 5, 2), 5)
    rows = factor.coalesced(torch.float64)
    assert_near(rows.materialize(), factor.materialize())
    for n in range(3):
        kept = [int(r) for r, g in zip(rows.index[n], rows.grad_output[n], strict=True) if g.any()]
        assert len(kept) == len(set(kept)) == len(set(index[n].tolist()))


@pytest.mark.parametrize("kind", sorted(uses_of_one_weight()))
def test_transposed_factor_gives_the_gradients_of_the_transpose(kind: str) -> None:
    factor = uses_of_one_weight()[kind]
    assert_near(factor.transposed().materialize(), factor.materialize().mT)
