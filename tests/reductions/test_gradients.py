"""`SampleGradients`: everything of one parameter, with a number for each sample that multiplies it."""

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import ByOwner, Dense, ElementProduct, Factor, PositionSum
from pergrad.reductions import CountSketch, SampleGradients, SampleWeights, TwoSidedSketch
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    CASES,
    N,
    cast,
    convolution,
    data,
    dense_of,
    outer,
    rows,
)

SCALES: dict[str, Tensor | float] = {
    "none": 1.0,
    "of a mean": 4.0,
    "weights": torch.tensor([0.1, -2.0, 0.0, 3.0], dtype=torch.float64),
    "weights in float32": torch.tensor([0.1, -2.0, 0.0, 3.0]),
    "whole weights": torch.tensor([1.0, 2.0, 0.0, 3.0]).int(),
}


def scaled(factors: list[Factor], scale: Tensor | float) -> Tensor:
    gradients = dense_of(factors)
    if isinstance(scale, Tensor):
        return gradients * scale.double().view(-1, *[1] * (gradients.dim() - 1))
    return gradients * scale


def check_everything(given: SampleGradients, gradients: Tensor) -> None:
    """All that can be asked for, against the gradients themselves."""
    flat = gradients.view(N, -1)
    other = data(3, *gradients.shape[1:], seed=9)
    weights = data(N, seed=8)
    assert_near(given.squared_norms(), flat.square().sum(1), "squared norms")
    assert_near(given.total(), gradients.sum(0), "total")
    assert_near(given.weighted_sum(weights), torch.tensordot(weights, gradients, 1), "sum")
    assert_near(given.sum_of_squares(), gradients.square().sum(0), "squares")
    about = (gradients - other[0]).square().sum(0)
    assert_near(given.squares_about(other[0]), about, "squares about")
    assert_near(given.dots(other[0]), flat @ other[0].reshape(-1), "dots")
    assert_near(given.gram(), flat @ flat.T, "gram")
    assert_near(given.gram_against(other), flat @ other.view(3, -1).T, "gram against")
    for kind in (CountSketch, TwoSidedSketch):
        sketch = kind.of("w", given.shape, 8, 0)
        exact = SampleGradients([Dense(gradients)], bound=2**20).sketch(sketch)
        assert_near(given.sketch(sketch), exact, kind.__name__)


@pytest.mark.parametrize(
    ("name", "scale"),
    [*((name, "weights") for name in CASES), *(("tied and dense", scale) for scale in SCALES)],
)
def test_everything_is_that_of_the_scaled_gradients(name: str, scale: str) -> None:
    factors, number = CASES[name](), SCALES[scale]
    exact = scaled(factors, number)
    given = SampleGradients(factors, number, bound=300)
    assert (given.count, given.shape, given.dtype) == (N, exact.shape[1:], torch.float64)
    check_everything(given, exact)
    given = SampleGradients(CASES[name](), number, bound=300)
    given.compact()
    check_everything(given, exact)
    assert_near(given.materialize(), exact, "gradients")
    check_everything(given, exact)


@pytest.mark.parametrize("name", CASES)
def test_other_quantities_do_not_depend_on_whether_the_gradients_were_asked_for(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        alone = SampleGradients(cast(CASES[name](), dtype), bound=300)
        after = SampleGradients(cast(CASES[name](), dtype), bound=300)
        assert after.materialize(dtype).dtype == dtype
        assert torch.equal(after.squared_norms(), alone.squared_norms())
        assert torch.equal(after.total(), alone.total())
        assert after.dtype == dtype


def test_weights_are_not_rounded_to_the_type_of_the_gradients() -> None:
    weights = torch.tensor([257.0, 1 / 3, 1e-5, 1.0])
    for dtype in (torch.bfloat16, torch.float16):
        factors = cast([outer(N, 3)], dtype)
        found = SampleGradients(factors, weights, bound=300).materialize(torch.float32)
        exact = scaled(factors, weights)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-9)
        rounded = SampleGradients(factors, weights, bound=300).materialize()
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded, exact.to(dtype), rtol=2**-7, atol=1e-6)


def test_norms_and_total_are_computed_once() -> None:
    given = SampleGradients([outer(N, 2)], bound=300)
    assert given.squared_norms() is given.squared_norms()
    assert given.total() is given.total()


def test_compacting_keeps_what_takes_less_room() -> None:
    long, short = outer(N, 40, 3, 3), outer(N, 1, 30, 30)
    biases = PositionSum(torch.randn(N, 40, 3)), PositionSum(torch.randn(N, 1, 3))
    expected = ((long, True), (short, False), (biases[0], True), (biases[1], False))
    for factor, is_dense in expected:
        given = SampleGradients([factor], bound=300)
        given.compact()
        assert isinstance(given.factors[0], Dense) is is_dense


def test_compacting_at_any_size_keeps_gradients_that_are_slow_to_find() -> None:
    short, single = outer(N, 2, 30, 30), outer(N, 1, 30, 30)
    (halves,) = cast([short], torch.bfloat16)
    embedded = rows(N, 2, table=90, width=30)
    expected = ((short, True), (single, False), (halves, False), (embedded, False))
    for factor, is_dense in expected:
        given = SampleGradients([factor], bound=300)
        squares = given.squared_norms()
        given = SampleGradients([factor], bound=300)
        given.compact(at_any_size=True)
        assert isinstance(given.factors[0], Dense) is is_dense
        torch.testing.assert_close(given.squared_norms(), squares)


def test_kinds_are_those_that_arrived() -> None:
    given = SampleGradients(CASES["tied and dense"](), bound=300)
    assert given.kinds == ["RowSum", "Dense", "OuterProduct"]


@st.composite
def uses(draw: st.DrawFn) -> list[Factor]:
    """One to three uses of a weight by a few samples, in one type, lying anyhow in memory."""
    n, t = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))

    def one(seed: int) -> Factor:
        if is_kernel:
            return convolution(
                rows_of_it, space, (k, k), groups=groups, stride=stride, padding=padding, seed=seed
            )
        kind = draw(st.sampled_from(["outer", "rows", "positions", "elements", "dense"]))
        if kind == "outer":
            return outer(rows_of_it, t, o, i, seed)
        if kind == "rows":
            return rows(rows_of_it, t, o, i, seed)
        if kind == "positions":
            return PositionSum(data(rows_of_it, t, o, i, seed=seed))
        if kind == "elements":
            g = data(rows_of_it, t, o, i, seed=seed)
            return ElementProduct(g, data(rows_of_it, t, o, i, seed=seed + 1))
        return Dense(data(rows_of_it, o, i, seed=seed))

    is_kernel, o, i = draw(st.booleans()), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    k, groups, stride = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = (draw(st.integers(0, 1)), draw(st.integers(0, 1)))
    space = (draw(st.integers(2, 4)), draw(st.integers(2, 4)))
    found = []
    for seed in range(draw(st.integers(1, 3))):
        is_owned = draw(st.booleans())
        rows_of_it = draw(st.integers(1, 5)) if is_owned else n
        (factor,) = cast([one(10 * seed)], dtype)
        if draw(st.booleans()):
            factor = factor.mapped(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1))
        if is_owned:
            owner = draw(st.lists(st.integers(0, n - 1), min_size=rows_of_it, max_size=rows_of_it))
            factor = ByOwner(factor, torch.tensor(owner), n)
        found.append(factor)
    return found


@settings(deadline=None, derandomize=True, max_examples=120)
@over(uses(), st.integers(1, 3000))
def test_any_uses_of_a_weight_give_what_their_gradients_give(
    factors: list[Factor], bound: int
) -> None:
    gradients = dense_of(factors)
    flat = gradients.view(len(gradients), -1)
    share = 1e-9 if factors[0].dtype == torch.float64 else 1e-4
    size = float(max(f.materialize(torch.float64).abs().max() for f in factors)) + 1e-300
    given = SampleGradients(factors, bound=bound)
    direction = data(*gradients.shape[1:], seed=9)
    entries = flat.shape[1]
    for found, exact, unit in (
        (given.dots(direction), flat @ direction.flatten(), size * entries),
        (given.total(), gradients.sum(0), size * len(flat)),
        (given.squared_norms(), flat.square().sum(1), size**2 * entries),
        (given.gram(), flat @ flat.T, size**2 * entries),
        (given.sum_of_squares(), gradients.square().sum(0), size**2 * len(flat)),
    ):
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= share * unit


@pytest.mark.parametrize("bound", [300, 2**20])
@pytest.mark.parametrize("scale", ["none", "weights"])
@pytest.mark.parametrize("name", CASES)
def test_sum_with_norms_is_the_sum_and_leaves_the_norms(name: str, scale: str, bound: int) -> None:
    exact = scaled(CASES[name](), SCALES[scale])
    given = SampleGradients(CASES[name](), SCALES[scale], bound=bound)
    weights = data(N, seed=8)
    for of_samples in (weights, SampleWeights(weights)):
        found = given.weighted_sum_and_norms(of_samples)
        assert_near(found, torch.tensordot(weights, exact, 1), "sum")
    assert_near(given.squared_norms(), exact.view(N, -1).square().sum(1), "squared norms")


def test_gradients_that_norms_and_a_sum_need_are_computed_once() -> None:
    factor = convolution(N, (12, 12), (3, 3), channels=2, outputs=3)
    made: list[Factor] = []

    class Counted(type(factor)):  # type: ignore[misc]
        def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
            made.append(self)
            return super().materialize(dtype)

    factor.__class__ = Counted
    given = SampleGradients([factor], bound=2**20)
    given.weighted_sum_and_norms(data(N, seed=8))
    given.squared_norms()
    assert len(made) == 1
