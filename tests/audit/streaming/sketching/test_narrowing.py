"""Narrowed kernels, against their gradients times the random columns."""

import pytest
import torch
from torch import nn

import pergrad
from pergrad.audit.streaming.sketching import narrowing
from pergrad.audit.streaming.sketching.narrowing import is_narrowed, narrowed, narrowings
from pergrad.audit.streaming.sketching.norms_and_sketch import NormsAndSketch
from pergrad.factors import Convolution
from pergrad.testing import assert_near
from tests.reductions.factor_cases import CASES, data, dense_of, factors_of

KERNELS = [
    name for name in CASES if len(factors_of(name)) == 1 and len(factors_of(name)[0].shape) > 2
]


@pytest.mark.parametrize("bound", [1, 2**22])
@pytest.mark.parametrize("name", KERNELS)
def test_narrowed_gradients_are_the_gradients_times_the_signs(name, bound, monkeypatch):
    monkeypatch.setattr(narrowing, "_WIDTH", 3)
    (factor,) = factors_of(name)
    exact = dense_of([factor]).flatten(2)
    signs = data(exact.shape[2], 3)
    parts = list(narrowed(factor, signs, bound))
    assert len(parts) == (len(exact) if bound == 1 else 1)
    found = torch.cat([product for _, product in parts])
    assert_near(found, exact @ signs)
    assert [(s.start, s.stop) for s, _ in parts][-1][1] == len(exact)


def test_one_sample_is_one_convolution_in_every_dimension():
    for dims in (1, 2, 3):
        ones, space = (1,) * dims, (5,) * dims
        g, x = data(2, 1, 4, *space), data(2, 1, 3, *space)
        factor = Convolution(g, x, (4, 3, *(3,) * dims), ones, ((1, 1),) * dims, ones, 1)
        signs = data(3 * 3**dims, 6)
        windows = factor.as_outer_product().input  # (n, p, c·k)
        assert_near(factor.windows_times(signs).mT, windows @ signs)


def test_only_kernels_that_get_cheaper_are_narrowed():
    assert is_narrowed((64, 32, 3, 3))
    assert not is_narrowed((32, 16, 3, 3))
    assert not is_narrowed((1024, 1024))
    assert set(narrowings({"a": (64, 32, 3, 3), "b": (64, 1, 3, 3)}, 0)) == {"a"}


def test_narrowed_products_keep_inner_products_on_average():
    a, b = data(1, 64, 96), data(1, 64, 96, seed=1)
    products = []
    for seed in range(400):
        signs = narrowings({"w": (64, 32, 3)}, seed)["w"].double()
        products.append(float(((a @ signs) * (b @ signs)).sum()))
    exact, spread = float((a * b).sum()), torch.tensor(products)
    assert abs(float(spread.mean()) - exact) < 4 * float(spread.std()) / 20


class Kernels(nn.Module):
    """Large kernels used twice, with strides and groups; none of its samples meet."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 40, 3, padding=1)
        self.large = nn.Conv2d(40, 40, 3, padding=1)
        self.grouped = nn.Conv2d(160, 80, 3, stride=2, groups=2)
        self.back = nn.ConvTranspose2d(80, 48, 2)
        self.head = nn.Linear(48, 3)

    def forward(self, x):
        x = torch.tanh(self.large(torch.tanh(self.first(x))))
        x = torch.tanh(self.large(x)).repeat(1, 4, 1, 1)
        return self.head(self.back(torch.tanh(self.grouped(x))).flatten(2).mean(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sketch_of_a_model_is_that_of_its_gradients(dtype):
    torch.manual_seed(0)
    model = Kernels().to(dtype)
    narrow = {n for n, p in model.named_parameters() if is_narrowed(p.shape)}
    assert narrow == {"large.weight", "grouped.weight", "back.weight"}
    x = data(5, 2, 6, 6).to(dtype)
    quantity, grads = NormsAndSketch(64, 3, has_norms=False), pergrad.Grads()
    for _ in range(2):  # the second time by the maps of the first
        for one in (quantity, grads):
            one.reset()
        with pergrad.record(model, quantity, grads):
            model(x).pow(3).sum().backward()
        for n in range(5):
            own = {name: rows[n] for name, rows in grads.result.items()}
            found, expected, _ = quantity.sample_report(n, own)
            close = {torch.float64: 1e-9, torch.float32: 1e-4}[dtype]
            scale = float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=close, atol=close * scale)
