"""Random projections: one linear map for all kinds of factors, which keeps inner products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import Dense, Factor, joined
from pergrad.reductions import sketches
from pergrad.reductions.choosing import fourier_is_cheaper
from pergrad.reductions.sketches import (
    CountSketch,
    TwoSidedSketch,
    _gathered,
    _scattered,
    by_entries,
    by_fourier,
    count_sketch,
    two_sided_sketch,
)
from pergrad.runtime import Chooser
from pergrad.testing import assert_near
from tests.reductions.factor_cases import (
    BOUNDS,
    CASES,
    N,
    cast,
    data,
    dense_of,
    factors_of,
    outer,
    rows,
    with_bad_sample,
)
from tests.reductions.memory import largest_tensor

METHODS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "count": (CountSketch, count_sketch),
    "two-sided": (TwoSidedSketch, two_sided_sketch),
}
each_method = pytest.mark.parametrize("method", METHODS)


def sketched(
    method: str,
    factors: list[Factor],
    size: int = 12,
    seed: int = 0,
    bound: int = 2**20,
    name: str = "w",
) -> Tensor:
    kind, reduce = METHODS[method]
    return reduce(factors, kind.of(name, factors[0].shape[1:], size, seed), bound)


@each_method
@pytest.mark.parametrize("name", CASES)
def test_all_kinds_of_factors_see_the_same_map(method: str, name: str) -> None:
    gradients = Dense(dense_of(CASES[name]()))
    for size in (12, 7):
        exact = sketched(method, [gradients], size)
        assert exact.shape == (N, size)
        for bound in BOUNDS:
            for factors in (CASES[name](), factors_of(name)):
                assert_near(sketched(method, factors, size, bound=bound), exact, f"{bound} bytes")


@each_method
def test_map_is_linear(method: str) -> None:
    a, b = data(N, 6, 5), data(N, 6, 5, seed=1)
    together = sketched(method, [Dense(2 * a - b)])
    apart = 2 * sketched(method, [Dense(a)]) - sketched(method, [Dense(b)])
    assert_near(together, apart)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 17),
    st.integers(1, 3000),
)
def test_both_ways_of_a_count_sketch_give_the_same(
    n: int, t: int, o: int, i: int, size: int, bound: int
) -> None:
    factor, sketch = outer(n, t, o, i), CountSketch.of("w", (o, i), size, 0)
    exact = by_entries(Dense(factor.materialize()), sketch, 2**20)
    assert_near(by_fourier(factor, sketch, bound), exact, "by Fourier transforms")
    assert_near(by_entries(factor, sketch, bound), exact, "by entries")
    assert_near(count_sketch([factor], sketch, bound), exact, "as chosen")


@pytest.mark.parametrize("columns", [1, 7, 8, 9, 24, 30])
def test_columns_by_runs_are_added_to_their_buckets(columns: int) -> None:
    sketch, x = CountSketch.of("w", (3, columns), 8, 0), data(2, 5, columns)
    expected = torch.zeros(2, 5, 8, dtype=x.dtype)
    signs = sketch.column_signs.tolist()
    for column, (bucket, sign) in enumerate(
        zip(sketch.column_buckets.tolist(), signs, strict=True)
    ):
        expected[..., bucket] += sign * x[..., column]
    assert_near(sketch.of_columns(x), expected)


def test_wide_layers_are_sketched_without_their_gradients() -> None:
    factor, sketch = outer(2, 1, 64, 64), CountSketch.of("w", (64, 64), 16, 0)
    assert fourier_is_cheaper(1, 64, 64, 16)
    assert largest_tensor(lambda: count_sketch([factor], sketch, 2**20)) < 64 * 64 * 8 / 2
    assert largest_tensor(lambda: two_sided_sketch([factor], two_sided(64, 64), 2**20)) < 64 * 64


def two_sided(o: int, i: int) -> TwoSidedSketch:
    return TwoSidedSketch.of("w", (o, i), 16, 0)


@each_method
def test_expected_inner_products_are_those_of_the_gradients(method: str) -> None:
    """Over 400 seeds the mean is off by less than 5 of its standard errors."""
    gradients = data(3, 4, 3)
    flat = gradients.view(3, -1)
    exact = flat @ flat.T
    found = []
    for seed in range(400):
        s = sketched(method, [Dense(gradients)], 16, seed)
        found.append(s @ s.T)
    products = torch.stack(found).double()
    error = products.std(0) / 400**0.5
    assert ((products.mean(0) - exact).abs() <= 5 * error).all()
    assert (error < 0.1 * exact.diagonal().max()).all()


def mean_error(method: str, size: int) -> float:
    gradients = data(3, 8, 6)
    flat = gradients.view(3, -1)
    lengths = flat.norm(dim=1)
    errors = []
    for seed in range(40):
        s = sketched(method, [Dense(gradients)], size, seed).double()
        errors.append((((s @ s.T) - flat @ flat.T) / (lengths[:, None] * lengths)).square().mean())
    return float(torch.stack(errors).mean().sqrt())


@each_method
def test_error_falls_with_the_square_root_of_the_size(method: str) -> None:
    coarse, fine = mean_error(method, 16), mean_error(method, 256)
    assert fine < coarse / 2
    if method == "count":
        assert coarse < 1.5 * (2 / 16) ** 0.5
        assert fine < 1.5 * (2 / 256) ** 0.5


@each_method
@pytest.mark.parametrize("name", ["two positions", "rows", "2d", "vector", "tied"])
def test_samples_are_sketched_alike_in_any_batch(method: str, name: str) -> None:
    whole = sketched(method, factors_of(name))
    parts = [
        sketched(method, [f.part(slice(n, n + 1)) for f in factors_of(name)]) for n in range(N)
    ]
    assert_near(torch.cat(parts), whole)


@each_method
def test_other_seeds_and_other_parameters_are_other_maps(method: str) -> None:
    factors: list[Factor] = [Dense(data(N, 6, 5))]
    maps = [
        sketched(method, factors, seed=seed, name=name) for seed in (0, 1) for name in ("w", "v")
    ]
    for a, first in enumerate(maps):
        for second in maps[:a]:
            assert not torch.allclose(first, second)


@each_method
@pytest.mark.parametrize("name", CASES)
def test_low_precision_is_multiplied_and_summed_in_float32(method: str, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        factors = cast(CASES[name](), dtype)
        exact = sketched(method, [Dense(dense_of(factors))])
        found = sketched(method, joined(factors), bound=300)
        assert found.dtype == torch.float32
        assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@each_method
@pytest.mark.parametrize("name", CASES)
def test_a_sample_that_is_not_finite_touches_no_other(method: str, name: str) -> None:
    others = torch.tensor([0, 2, 3])
    for bound in BOUNDS:
        plain = sketched(method, CASES[name](), bound=bound)[others]
        for value in (float("nan"), float("inf")):
            bad = with_bad_sample(CASES[name](), 1, value)
            found = sketched(method, bad, bound=bound)[others]
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_no_intermediate_exceeds_the_bound() -> None:
    bound = 20_000
    for factor in (outer(6, 3, 32, 32), Dense(data(6, 32, 32)), rows(6, 8, 64, 32)):
        sketch = CountSketch.of("w", factor.shape[1:], 64, 0)
        assert largest_tensor(factor.materialize) > bound or isinstance(factor, Dense)
        assert largest_tensor(lambda f=factor, s=sketch: count_sketch([f], s, bound)) <= bound


@pytest.mark.parametrize("shape", [(3, 20), (3, 4, 5), (3, 2, 2, 5), (20,)])
def test_neighbouring_columns_have_neighbouring_buckets(shape: tuple[int, ...]) -> None:
    sketch = CountSketch.of("w", shape, 8, 0)
    for run in sketch.column_buckets.split(8):
        assert torch.equal(run, (run[0] + torch.arange(len(run))) % 8)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (30,), (1, 30)])
@pytest.mark.parametrize("bound", [1, 300, 2**20])
def test_a_row_alone_is_added_to_the_buckets_of_its_columns(
    shape: tuple[int, ...], bound: int
) -> None:
    sketch, gradients = CountSketch.of("w", shape, 8, 0), data(N, *shape)
    expected = torch.zeros(N, 8, dtype=gradients.dtype)
    signed = gradients.reshape(N, -1) * sketch.column_signs
    expected.index_add_(1, sketch.column_buckets, signed)
    assert_near(by_entries(Dense(gradients), sketch, bound), expected)
    x = data(2, 5, 1)
    assert_near(sketch.of_rows(x)[..., :1], x)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24, 30])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_reading_the_members_of_buckets_is_adding_to_buckets(side: str, count: int) -> None:
    shape = (count, 3) if side == "rows" else (3, count)
    sketch, x = CountSketch.of("w", shape, 8, 0), data(2, 5, count)
    of_rows = sketch.row_members, sketch.row_buckets, sketch.row_signs
    of_columns = sketch.column_members, sketch.column_buckets, sketch.column_signs
    members, buckets, signs = of_rows if side == "rows" else of_columns
    assert_near(_gathered(x, members), _scattered(x, buckets, signs, 8))
    halves = x.to(torch.bfloat16)
    assert _gathered(halves, members).dtype == torch.float32
    assert_near(_gathered(halves, members), _gathered(halves.float(), members))


@pytest.mark.parametrize(
    ("way", "step"),
    [("gathered", "_gathered"), ("runs", "_by_runs"), ("single entries", "_scattered")],
)
def test_columns_are_sketched_by_the_way_that_is_picked(
    way: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sketch, x = CountSketch.of("w", (3, 20), 8, 0), data(2, 5, 20)
    expected, called = sketch.of_columns(x), []
    for name, of in (("_gathered", sketches), ("_scattered", sketches), ("_by_runs", CountSketch)):
        run = getattr(of, name)
        monkeypatch.setattr(
            of, name, lambda *args, name=name, run=run: (called.append(name), run(*args))[1]
        )
    chooser = Chooser({"sketch of columns": way, "buckets": "by row"})
    monkeypatch.setattr(sketches, "chooser_of", lambda _: chooser)
    assert_near(sketch.of_columns(x), expected)
    assert called == [step]


def test_rows_of_one_run_never_meet_and_others_do_by_chance() -> None:
    rows = torch.stack([CountSketch.of("w", (24, 1), 8, s).row_buckets for s in range(2000)])
    assert torch.equal(rows[:, :8].sort(1).values, torch.arange(8).expand(2000, 8))
    apart = (rows[:, 0] - rows[:, 3]) % 8
    assert int(apart.min()) == 1
    for other in (8, 9, 16, 23):
        share = (rows[:, 0] == rows[:, other]).double().mean()
        assert abs(float(share) - 1 / 8) < 5 * (1 / 8 * 7 / 8 / 2000) ** 0.5


def test_columns_of_different_runs_meet_as_often_as_chance_has_it() -> None:
    columns = torch.stack([CountSketch.of("w", (1, 24), 8, s).column_buckets for s in range(2000)])
    for other in (8, 9, 16, 23):
        share = (columns[:, 0] == columns[:, other]).double().mean()
        assert abs(float(share) - 1 / 8) < 5 * (1 / 8 * 7 / 8 / 2000) ** 0.5


COUNT_GOLDEN = {
    (4, 3): [[-2.0, 16.0, -11.0, 5.0, 9.0, -7.0]],
    (2, 2, 3): [[-5.0, 5.0, -15.0, -5.0, 13.0, 5.0]],
    (12,): [[-11.0, -5.0, -5.0, -17.0, -13.0, 9.0]],
}
TWO_SIDED_GOLDEN = [[-6.0, 6.0, -6.0, -6.0, 6.0, -6.0]]


def test_map_stays_what_it_is_from_version_to_version() -> None:
    """Sketches are stored: those of two versions must be comparable."""
    entries = torch.arange(1.0, 13.0, dtype=torch.float64)
    for shape, golden in COUNT_GOLDEN.items():
        whole: list[Factor] = [Dense(entries.view(1, *shape))]
        assert sketched("count", whole, 6, seed=3, name="layer.weight").tolist() == golden
    found = sketched("two-sided", [Dense(entries.view(1, 4, 3))], 6, seed=3, name="layer.weight")
    assert_near(found, torch.tensor(TWO_SIDED_GOLDEN, dtype=torch.float64) / 6**0.5)


def test_sketches_of_several_parameters_are_those_of_each() -> None:
    shapes = {"a": (3, 20), "b": (4,), "c": (), "d": (2, 3, 2, 2), "e": (0, 5)}
    together = CountSketch.of_all(shapes, 8, 1)
    for name, shape in shapes.items():
        alone = CountSketch.of(name, shape, 8, 1)
        assert together[name].runs == alone.runs
        for found, wanted in zip(together[name].entries(), alone.entries(), strict=True):
            assert torch.equal(found, wanted)
