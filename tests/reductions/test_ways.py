"""Every way of a reduction computes the same, on machines that do not take it as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.factors import Factor, OuterProduct, PositionSum, RowSum, Stacked, owned
from pergrad.factors import products as outer_products
from pergrad.reductions import SampleGradients, gram, norms, sketches, sums
from pergrad.testing import assert_near


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("way", sketches.BUCKET_WAYS)
def test_ways_to_scatter_into_buckets(way: str) -> None:
    flat, signs = random(3, 5), torch.tensor([1.0, -1, 1, -1, -1], dtype=torch.float64)
    buckets = torch.tensor([0, 3, 3, 1, 0])
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for j, bucket in enumerate(buckets.tolist()):
        expected[:, bucket] += signs[j] * flat[:, j]
    assert_near(sketches.BUCKET_WAYS[way](flat, buckets, signs, 4), expected)


@pytest.mark.parametrize("positions", [1, 4])
def test_ways_to_multiply_transforms(positions: int) -> None:
    g, x = torch.fft.rfft(random(3, positions, 6)), torch.fft.rfft(random(3, positions, 6) + 1)
    expected = torch.stack([sum(g[n] * x[n]) for n in range(3)])
    for way in sketches.PRODUCT_WAYS.values():
        assert_near(torch.view_as_real(way(g, x)), torch.view_as_real(expected))


@pytest.mark.parametrize("is_any_dropped", [False, True])
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 2, 5)])
@pytest.mark.parametrize("way", sorted({*sums.SCALING_WAYS} - {"kernel"}))
def test_ways_to_scale_samples(way: str, shape: tuple[int, ...], is_any_dropped: bool) -> None:
    x, scale = random(*shape), torch.tensor([0.5, -3.0, 2.0], dtype=torch.float64)
    expected = torch.stack([s * row for s, row in zip(scale, x, strict=True)])
    if is_any_dropped:
        scale[1], expected[1], x[1] = 0.0, 0.0, float("nan")
    assert_near(sums.SCALING_WAYS[way](x, scale), expected)


WITHOUT_KERNELS = sorted({*sums.WEIGHTED_ROWS_WAYS} - {"kernel"})


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("way", WITHOUT_KERNELS)
def test_ways_to_sum_weighted_rows(
    way: str, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "is_large", lambda shape, _: is_large)
    rows, scale = random(3, 5), torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    expected = scale @ rows
    rows[1] = float("nan")  # its scale is zero
    assert_near(sums.WEIGHTED_ROWS_WAYS[way](rows, scale), expected)


@pytest.mark.parametrize("bound", [1, 2**20])
@pytest.mark.parametrize("way", ["inner products", "gradients", "small gradients"])
@pytest.mark.parametrize("shape", [(3, 4, 2, 5), (1, 4, 4, 4), (3, 0, 2, 5)])
def test_ways_to_compute_norms_of_an_outer_product(
    way: str, bound: int, shape: tuple[int, ...]
) -> None:
    n, t, o, i = shape
    factor = OuterProduct(random(n, t, o), random(n, t, i))
    exact = torch.einsum("nto,nti->noi", factor.grad_output, factor.input).square().sum((1, 2))
    assert_near(norms.OUTER_PRODUCT_WAYS[way](factor, bound), exact)


@pytest.mark.parametrize("bound", [1, 2**20])
@pytest.mark.parametrize("way", ["rows added up", "whole table"])
def test_ways_to_compute_norms_of_a_table(way: str, bound: int) -> None:
    index = torch.tensor([[1, 1, 4, 0], [2, 2, 2, 2], [0, 1, 2, 3]])
    table = RowSum(index, random(3, 4, 2), 5)
    exact = torch.zeros(3, 5, 2, dtype=torch.float64)
    for n in range(3):
        for t in range(4):
            exact[n, index[n, t]] += table.grad_output[n, t]
    assert_near(norms.TABLE_WAYS[way](table, bound), exact.square().sum((1, 2)))


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 1, 2, 4), (3, 1), (3, 1, 2**13), (0, 1, 4)])
def test_norms_of_one_position_are_those_of_the_gradient(shape: tuple[int, ...]) -> None:
    g = random(*shape)
    found = norms.squared_norms([PositionSum(g)], 2**20)
    assert_near(found, g.reshape(shape[0], -1 if shape[0] else 4).square().sum(1))


@pytest.mark.parametrize("way", sorted({*norms.MENDING_WAYS} - {"kernel"}))
def test_ways_to_mend_norms(way: str) -> None:
    factor = OuterProduct(random(3, 4, 2), random(3, 4, 5))
    exact = factor.materialize().flatten(1).square().sum(1)
    found, terms = exact.clone(), exact.clone()
    found[1] = -1.0  # it cancelled
    mended = norms.MENDING_WAYS[way](found.clone(), terms, [factor], 2**20)
    if way == "left as found":
        exact[1] = 0.0
    assert_near(mended, exact)


def test_kernels_get_the_tensors_of_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launchers:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: (name, *args)

    monkeypatch.setattr(norms, "all_launchers", Launchers)
    g, x, found, terms = random(2, 1, 3), random(2, 1, 4), random(2), random(2)
    factor = OuterProduct(g, x)
    name, *args = norms.OUTER_PRODUCT_WAYS["tile kernel"](factor, 0)
    assert name == "tile_squared_norms"
    assert args[0] is g
    assert args[1] is x
    name, *args = norms.OUTER_PRODUCT_WAYS["rank one kernel"](factor, 0)
    assert name == "rank_one_squared_norms"
    assert torch.equal(args[0], g[:, 0])
    assert torch.equal(args[1], x[:, 0])
    name, *args = norms.MENDING_WAYS["kernel"](found, terms, [factor], 0)
    assert name == "mended_squared_norms"
    assert all(a is b for a, b in zip(args, (found, terms, g, x), strict=True))


def test_a_gram_that_is_left_as_found_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Left:
        @staticmethod
        def pick(choice: str, sizes: object = ()) -> str:
            return "left as found" if choice == "check of a gram" else "pairs"

    monkeypatch.setattr(gram, "chooser_of", lambda *_: Left)
    factor = OuterProduct(random(3, 4, 2), random(3, 4, 5))
    rows = factor.materialize().flatten(1)
    with monkeypatch.context() as patch:
        patch.setattr(gram, "by_rows", None)
        assert_near(gram.gram([factor], 2**20), rows @ rows.T)


def test_gradients_padded_to_a_multiple_of_8_are_cut_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 5))

    monkeypatch.setattr(outer_products, "with_aligned_width", padded)
    g, x = random(2, 4, 3), random(2, 4, 5)
    exact = torch.einsum("nto,nti->noi", g, x)
    for large in (3 * 5, 3 * 5 + 1):  # from as many elements on
        monkeypatch.setattr(outer_products, "_LARGE", large)
        found = outer_products.GRADIENT_WAYS["as it is"](g, x, torch.float64)
        assert_near(found, exact)
        assert found.is_contiguous() == (large > 15)


@pytest.mark.parametrize("owners", [[1, 0, 1], [2, 2, 0]], ids=str)
def test_stacks_of_rows_belong_to_the_samples_of_their_rows(owners: list[int]) -> None:
    each = Stacked(OuterProduct(random(6, 4, 2), random(6, 4, 5)), 2)  # of three rows
    found: Factor = owned(each, torch.tensor(owners), 3)
    expected = torch.zeros(3, 2, 2, 5, dtype=torch.float64)
    expected.index_add_(0, torch.tensor(owners), each.materialize())
    assert_near(found.materialize(), expected)


def test_gradients_have_the_coarsest_dtype_of_their_uses() -> None:
    def of(*dtypes: torch.dtype) -> torch.dtype:
        uses = [PositionSum(random(2, 3, 4).to(dtype)) for dtype in dtypes]
        return SampleGradients(uses, bound=2**20).dtype

    half, single = torch.bfloat16, torch.float32
    assert of(single, half) == of(half, single) == of(single, half, single) == half
    assert of(torch.float64, single) == single
    assert of(torch.float16, half) == half


def test_a_factor_without_tensors_must_say_where_it_is() -> None:
    class Nowhere(PositionSum):
        def __init__(self) -> None: ...

    with pytest.raises(NotImplementedError, match="Nowhere holds no tensor"):
        _ = Nowhere().device
