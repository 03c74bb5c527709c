"""Squared norms by every way, against those of the gradients themselves."""

from collections.abc import Callable, Hashable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pergrad.factors import (
    Dense,
    Factor,
    OuterProduct,
    PositionSum,
    Rearranged,
    RowSum,
    Scaled,
    Stacked,
    joined,
)
from pergrad.reductions import choosing
from pergrad.reductions.choosing import chooser_for
from pergrad.reductions.norms import by_gram, by_rank_one, by_tiles, squared_norms
from pergrad.runtime import MACHINES
from pergrad.runtime.caches import clear_caches
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    BOUNDS,
    CASES,
    N,
    cast,
    convolution,
    data,
    dense_of,
    factors_of,
    outer,
    rows,
    with_bad_sample,
)
from tests.reductions.memory import largest_tensor

_LITTLE = choosing._LITTLE


@pytest.fixture(autouse=True, scope="module")
def _small_cases_go_the_ways_of_large_ones() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "_LITTLE", 0)
        yield


def way_of(choice: str, sizes: tuple[Hashable, ...]) -> str:
    """The way of a CPU that computes at once."""
    return chooser_for(MACHINES["cpu", "eager"], False).pick(choice, sizes)


def expected(factors: list[Factor]) -> Tensor:
    return dense_of(factors).view(factors[0].shape[0], -1).square().sum(1)


@pytest.mark.parametrize("name", CASES)
def test_squared_norms_are_those_of_the_gradients(name: str) -> None:
    exact = expected(CASES[name]())
    for bound in BOUNDS:
        found = squared_norms(factors_of(name), bound)
        assert found.dtype == torch.float64
        assert_near(found, exact, f"in {bound} bytes")
        assert_near(by_tiles(factors_of(name), bound), exact, f"by tiles of {bound} bytes")


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(1, 4), st.integers(0, 6), st.integers(1, 7), st.integers(1, 7), st.integers(1, 2000)
)
def test_every_way_of_an_outer_product_gives_the_same(
    n: int, t: int, o: int, i: int, bound: int
) -> None:
    factor = outer(n, t, o, i)
    exact = expected([factor])
    assert_near(by_gram(factor, bound), exact, "by gram")
    assert_near(by_tiles([factor], bound), exact, "by tiles")
    assert_near(squared_norms([factor], bound), exact, "as chosen")
    if t == 1:
        assert_near(by_rank_one(factor), exact, "by rank one")


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.integers(1, 3), st.integers(0, 5), st.integers(0, 5), st.integers(1, 2000))
def test_tied_weights_count_the_cross_term(n: int, t: int, s: int, bound: int) -> None:
    factors: list[Factor] = [rows(n, t, 8, 3), outer(n, s, 8, 3)]
    assert_near(squared_norms(factors, bound), expected(factors))
    assert_near(squared_norms(factors[::-1], bound), expected(factors))


@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_multiplied_and_summed_in_float32(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        found = squared_norms(joined(factors), 300)
        torch.testing.assert_close(found, expected(factors), rtol=1e-5, atol=1e-9)


def test_factors_may_lie_anyhow_in_memory() -> None:
    for factor in (outer(3, 4), rows(3, 4), convolution(3, (5, 4), (2, 2), groups=2)):
        strided = factor.mapped(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
        assert not any(t.is_contiguous() for t in strided._tensors().values())
        for bound in BOUNDS:
            assert_near(squared_norms([strided], bound), expected([factor]))
    repeated = OuterProduct(data(1, 1, 6).expand(3, 4, 6), data(3, 1, 5).expand(3, 4, 5))
    assert_near(squared_norms([repeated], 300), expected([repeated]))


# Memory


@pytest.mark.parametrize(
    "factors",
    [
        [outer(4, 3, 32, 32)],  # by Gram matrices
        [outer(4, 24, 32, 32)],  # by tiles
        [rows(2, 4, 64, 16), outer(2, 3, 64, 16)],
        [Dense(data(4, 64, 16)), PositionSum(data(4, 2, 64, 16))],
        [convolution(4, (6, 6), (3, 3), channels=8, outputs=16)],
        [convolution(4, (3, 3), (2, 2), channels=32, outputs=64)],
    ],
    ids=["gram", "tiles", "tied", "dense", "convolution", "convolution by gram"],
)
@pytest.mark.parametrize("bound", [4_000, 16_000])
def test_no_intermediate_exceeds_the_bound(factors: list[Factor], bound: int) -> None:
    ours = joined(factors)
    windows = max(f.scratch for f in ours) * 8  # of one sample: less than that cannot be had
    assert largest_tensor(lambda: squared_norms(ours, bound)) <= max(bound, windows)
    assert largest_tensor(lambda: dense_of(factors)) > bound


def test_windows_of_a_wide_convolution_are_copied_within_the_bound() -> None:
    """Its gradients would come without windows, but its Gram matrices do not."""
    factor = convolution(8, (7, 7), (2, 2), channels=16, outputs=256)
    assert factor.scratch == 0
    assert way_of("norms of a convolution", (factor.positions, 256, 64, 2)) == "inner products"
    bound = 2 * 8 * 64 * factor.positions  # two samples
    assert largest_tensor(lambda: squared_norms([factor], bound)) <= bound
    assert_near(squared_norms([factor], bound), expected([factor]))


def test_little_work_is_done_on_the_gradients_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = OuterProduct(data(N, 4, 32), data(N, 4, 64))
    sizes = factor.grad_output.shape, factor.input.shape
    assert way_of("norms of an outer product", sizes) == "inner products"
    assert largest_tensor(lambda: squared_norms([factor], 2**20)) < N * 32 * 64 * 8
    monkeypatch.setattr(choosing, "_LITTLE", _LITTLE)
    clear_caches()
    assert largest_tensor(lambda: squared_norms([factor], 2**20)) == N * 32 * 64 * 8
    assert_near(squared_norms([factor], 2**20), expected([factor]))


# Precision


def cancelling(dtype: torch.dtype, share: float, t: int = 8, o: int = 32, i: int = 64) -> Factor:
    """Pairs of positions with the same input, whose gradients differ by a small share only."""
    a, x = data(N, t // 2, o), data(N, t // 2, i)
    small = 1 + share * data(N, t // 2, o, seed=3)
    return OuterProduct(torch.cat([a, -a * small], 1).to(dtype), torch.cat([x, x], 1).to(dtype))


def by_traced_gram(factor: OuterProduct, bound: int) -> Tensor:
    """As a compiled step computes it, which is traced without numbers."""

    def run(g: Tensor, x: Tensor) -> Tensor:
        return by_gram(OuterProduct(g, x), bound)

    tensors = factor.grad_output, factor.input
    found: Tensor = make_fx(run, tracing_mode="fake")(*tensors)(*tensors)
    return found


WAYS: dict[str, Callable[[Factor, int], Tensor]] = {
    "gram": by_gram,
    "traced gram": by_traced_gram,
    "tiles": lambda factor, bound: by_tiles([factor], bound),
    "chosen": lambda factor, bound: squared_norms([factor], bound),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [0.02, 0.004])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_positions_that_cancel_leave_norms_exact(
    way: str, share: float, dtype: torch.dtype
) -> None:
    factor = cancelling(dtype, share)
    exact = expected([factor]).sqrt()
    for bound in BOUNDS:
        found = WAYS[way](factor, bound).sqrt()
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)
    g, x = factor.grad_output, factor.input
    coarse = ((g @ g.mT) * (x @ x.mT)).double().sum((1, 2)).clamp(min=0).sqrt()
    assert ((coarse - exact).abs() / exact).max() > 0.5  # what Gram matrices in that type give


@pytest.mark.parametrize("way", WAYS)
def test_positions_that_cancel_to_one_in_ten_thousand_in_float32(way: str) -> None:
    factor = cancelling(torch.float32, 1e-4)
    torch.testing.assert_close(
        WAYS[way](factor, 10_000).sqrt(), expected([factor]).sqrt(), rtol=1e-3, atol=0
    )


def test_head_that_cancels_its_table_leaves_norms_exact() -> None:
    index, a = torch.tensor([[0, 1], [3, 3]]), data(2, 2, 5)
    nearly = -a * (1 + 1e-4 * data(2, 2, 5, seed=3))
    head = OuterProduct(torch.nn.functional.one_hot(index, 4).double(), nearly)
    factors = cast([RowSum(index, a, 4), head], torch.float32)
    found = squared_norms(joined(factors), 10_000).sqrt()
    torch.testing.assert_close(found, expected(factors).sqrt(), rtol=1e-3, atol=0)


def test_only_samples_that_cancel_are_computed_again() -> None:
    factor, plain = cancelling(torch.float32, 1e-4), cast([outer(N, 8, 32, 64)], torch.float32)[0]
    g = torch.cat([factor.grad_output[:1], plain.grad_output[1:]])
    x = torch.cat([factor.input[:1], plain.input[1:]])
    found = by_gram(OuterProduct(g, x), 10_000)
    assert torch.equal(found[1:], by_gram(plain, 10_000)[1:])


def enlarged(factors: list[Factor], size: float) -> list[Factor]:
    """The same with larger gradients."""

    def one(factor: Factor) -> Factor:
        if isinstance(factor, Stacked):
            return Stacked(one(factor.each), factor.count)
        if isinstance(factor, Rearranged):
            return Rearranged(one(factor.each), factor.order, factor.sizes)
        if isinstance(factor, Scaled):
            return Scaled(one(factor.each), factor.constant)
        name = "gradients" if isinstance(factor, Dense) else "grad_output"
        new = iter([t * size if key == name else t for key, t in factor._tensors().items()])
        found: Factor = factor.mapped(lambda _: next(new))
        return found

    return [one(f) for f in factors]


@pytest.mark.parametrize("name", CASES)
def test_products_beyond_the_range_of_float16_are_finite(name: str) -> None:
    """Entries of 1e4: their squares, and sums of a few, are more than float16 has."""
    for dtype in (torch.float16, torch.bfloat16):
        large = cast(enlarged(factors_of(name), 1e4), dtype)
        found = squared_norms(joined(large), 300)
        torch.testing.assert_close(found, expected(large), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_norms_of_huge_gradients_are_numbers_or_infinite(name: str) -> None:
    for size in (1e10, 1e17, 1e25, 1e37):
        factors = enlarged(factors_of(name), size)
        found = squared_norms(cast(factors, torch.float32), 2**20)
        assert not found.isnan().any()
        assert (found >= 0).all()
        if size < 1e18:
            torch.testing.assert_close(found, expected(factors), rtol=1e-4, atol=0)


@pytest.mark.parametrize("t", [1, 3])
def test_huge_gradient_of_a_tiny_input_has_a_finite_norm(t: int) -> None:
    factor = OuterProduct(data(N, t, 6).float() * 1e24, data(N, t, 5).float() * 1e-24)
    torch.testing.assert_close(
        squared_norms([factor], 2**20), expected([factor]), rtol=1e-4, atol=0
    )
    nothing = OuterProduct(factor.grad_output, torch.zeros(N, t, 5))
    assert not squared_norms([nothing], 2**20).any()


@pytest.mark.parametrize("name", CASES)
def test_norms_of_zero_gradients_are_zero(name: str) -> None:
    zero = [
        f.mapped(lambda t: torch.zeros_like(t) if t.is_floating_point() else t)
        for f in factors_of(name)
    ]
    assert not squared_norms(zero, 300).any()


@pytest.mark.parametrize("name", CASES)
def test_a_sample_that_is_not_finite_touches_no_other(name: str) -> None:
    others = torch.tensor([0, 2, 3])
    has_it = bool(expected(CASES[name]())[1] > 0)
    for bound in BOUNDS:
        plain = squared_norms(factors_of(name), bound)
        for value in (float("nan"), float("inf")):
            found = squared_norms(joined(with_bad_sample(CASES[name](), 1, value)), bound)
            assert torch.equal(found[others], plain[others])
            assert bool(found[1].isfinite()) is not has_it
