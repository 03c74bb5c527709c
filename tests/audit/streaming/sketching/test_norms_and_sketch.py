"""Norms and sketches made together, against those made apart."""

import pytest
import torch
from torch import nn

import pergrad
from pergrad.audit.streaming.sketching import norms_and_sketch
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.factors import Convolution, Dense, OuterProduct
from pergrad.quantities import Batch
from pergrad.reductions import CountSketch, SampleGradients
from pergrad.testing import assert_near
from tests.reductions.factor_cases import CASES, cast, data, dense_of, factors_of


def map_of(shape, dim):
    return CountSketch.of("w", shape, dim, 3)


def sketch_of(gradients, sketch):
    """Add every entry to its bucket."""
    flat = gradients.reshape(len(gradients), -1)
    buckets, signs = sketch.entries()
    return flat.new_zeros(len(flat), sketch.size).index_add_(1, buckets, flat * signs)


def consumed(factors, dim=7, **options):
    shape = factors[0].shape
    quantity = NormsAndSketch(dim, 3, **options)
    quantity.begin(Batch(shape[0], {"w": torch.zeros(shape[1:], dtype=factors[0].dtype)}))
    quantity.consume("w", SampleGradients(factors, bound=2**20))
    quantity.end()
    return quantity


@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("piece", [2**22, 400])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_factor_has_the_norms_and_the_sketch_of_its_gradients(
    name, dtype, piece, few, monkeypatch
):
    monkeypatch.setattr(norms_and_sketch, "_PIECE", piece)
    monkeypatch.setattr(norms_and_sketch, "_FEW", few)
    factors = cast(factors_of(name), dtype)
    exact = dense_of(factors)
    quantity = consumed(factors)
    expected = exact.reshape(len(exact), -1).square().sum(1)
    # Of a sum in low precision, the rounding of its terms stays.
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(quantity.squares["w"], expected, rtol=close, atol=close)
    apart = sketch_of(exact, map_of(exact.shape[1:], 7))
    torch.testing.assert_close(quantity.sketch.double(), apart, rtol=close, atol=10 * close)


@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("name", CASES)
def test_sketches_without_norms_are_those_with_them(name, few, monkeypatch):
    monkeypatch.setattr(norms_and_sketch, "_FEW", few)
    factors = cast(factors_of(name), torch.float64)
    found = consumed(factors, has_norms=False)
    assert not found.squares
    torch.testing.assert_close(found.sketch, consumed(factors).sketch, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("side", [4, 8, 12])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("taps", [1, 3])
def test_kernels_by_windows_and_by_samples_as_groups_have_the_same_sketch(
    taps, groups, side, dtype
):
    g, x = data(3, 1, 16, side, side).to(dtype), data(3, 1, 16 * groups, side, side).to(dtype)
    ones, around = (1, 1), ((taps // 2, taps // 2),) * 2
    factor = Convolution(g, x, (16, 16, taps, taps), ones, around, ones, groups)
    by_groups = dtype == torch.float32 and taps == 3
    assert norms_and_sketch._goes_by_samples_as_groups(factor) == by_groups
    found = consumed([factor], dim=64)
    (exact,) = cast([factor], torch.float64)
    exact = SampleGradients([Dense(exact.materialize())], bound=2**20)
    close = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
    expected = exact.squared_norms(), exact.sketch(map_of(factor.kernel, 64))
    for one, other in zip((found.squares["w"], found.sketch), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=close, atol=10 * close)


def test_a_batch_of_kernels_leaves_nothing_to_the_next_one():
    """Not of another size of images, nor what is not finite."""
    quantity, kernel = NormsAndSketch(64, 3), (32, 3, 3, 3)
    for n, side, value in ((9, 6, float("inf")), (4, 6, 1.0), (11, 8, 1.0), (9, 6, 1.0)):
        g, x = data(n, 1, 32, side, side), data(n, 1, 3, side, side) * value
        factor = Convolution(g, x, kernel, (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
        quantity.begin(Batch(n, {"w": torch.zeros(kernel, dtype=torch.float64)}))
        quantity.consume("w", SampleGradients([factor], bound=2**20))
        quantity.end()
        if value == 1:
            exact = SampleGradients([Dense(factor.materialize())], bound=2**20)
            assert_near(quantity.squares["w"], exact.squared_norms())
            assert_near(quantity.sketch, exact.sketch(map_of(kernel, 64)))
        else:
            assert not quantity.squares["w"].isfinite().any()


def test_more_threads_give_the_same():
    """Runs of neighbouring rows overlap in the sketch: none may be lost."""
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found.append(consumed([Dense(data(300, 40, 60))], dim=64))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0].sketch, found[1].sketch)
    exact = SampleGradients([Dense(data(300, 40, 60))], bound=2**20)
    assert_near(found[1].sketch, exact.sketch(map_of((40, 60), 64)))


def test_memory_that_pieces_share_is_not_in_the_results():
    quantity = NormsAndSketch(64, 3)
    shape = (40, 60)
    found = []
    for seed in (0, 1):
        factor = OuterProduct(data(9, 2, 40, seed=seed), data(9, 2, 60, seed=seed))
        quantity.begin(Batch(9, {"w": torch.zeros(shape, dtype=torch.float64)}))
        quantity.consume("w", SampleGradients([factor], bound=2**20))
        quantity.end()
        found.append((quantity.squares["w"], quantity.sketch, factor))
    for squares, sketch, factor in found:
        exact = SampleGradients([Dense(factor.materialize())], bound=2**20)
        assert_near(squares, exact.squared_norms())
        assert_near(sketch, exact.sketch(map_of(shape, 64)))


class Mixed(nn.Module):
    """An embedding, convolutions with and without groups, a norm, a wide and a narrow layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 24)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, stride=2)
        self.grouped = nn.Conv2d(4, 4, 2, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.wide = nn.Linear(4, 300)
        self.narrow = nn.Linear(300, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, words):
        x = self.table(words).view(len(words), 2, 4, 12)
        x = self.norm(self.grouped(self.conv(x))).flatten(2).mean(2)
        return self.narrow(torch.tanh(self.wide(x)))


@pytest.mark.parametrize("few", [0, 256])
@pytest.mark.parametrize("dim", [5, 64])
def test_a_model_has_the_norms_and_the_sketch_that_the_two_quantities_give(dim, few, monkeypatch):
    monkeypatch.setattr(norms_and_sketch, "_FEW", few)
    torch.manual_seed(0)
    model = Mixed().double()
    words = torch.randint(0, 11, (6, 4))
    norms, sketch = pergrad.Norms(), pergrad.Projection(dim, 3)
    both = NormsAndSketch(dim, 3)
    for _ in range(2):  # the second time by the tables of the first
        for quantity in (norms, sketch, both):
            quantity.reset()
        with pergrad.record(model, norms, sketch, both):
            model(words).square().sum().backward()
        assert list(both.squares) == [name for name, _ in model.named_parameters()]
        for name, found in norms.per_param.items():
            assert_near(both.squares[name].sqrt(), found)
        assert_near(both.sketch, sketch.result)


@pytest.mark.parametrize("few", [0, 256])
def test_gradients_that_others_hold_are_left_as_they_are(few, monkeypatch):
    monkeypatch.setattr(norms_and_sketch, "_FEW", few)
    held = torch.randn(4, 3, dtype=torch.float64)
    before = held.clone()
    consumed([Dense(held)])
    assert torch.equal(held, before)


def test_the_report_of_a_sample_is_what_its_gradient_gives():
    model, x = (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4)).double(),
        data(5, 2, 5),
    )
    quantity = NormsAndSketch(7, 3)
    grads = pergrad.Grads()
    with pergrad.record(model, quantity, grads):
        model(x).pow(3).sum().backward()
    for n in range(5):
        own = {name: rows[n] for name, rows in grads.result.items()}
        found, expected, _ = quantity.sample_report(n, own)
        assert_near(found, expected)
        own["0.weight"] = 2 * own["0.weight"]
        assert not torch.allclose(found, quantity.sample_report(n, own).expected)


@pytest.mark.parametrize("shape", [(), (5,), (2000,)])
@pytest.mark.parametrize("bound", [1, 2**20])
def test_vectors_may_be_used_twice(shape, bound):
    factors = [Dense(data(6, *shape)), Dense(data(6, *shape, seed=1))]
    quantity = NormsAndSketch(16, 3)
    quantity.begin(Batch(6, {"w": torch.zeros(shape, dtype=torch.float64)}))
    quantity.consume("w", SampleGradients(factors, bound=bound))
    quantity.end()
    exact = dense_of(factors)
    assert_near(quantity.squares["w"], exact.reshape(6, -1).square().sum(1))
    assert_near(quantity.sketch, sketch_of(exact, map_of(shape, 16)))
