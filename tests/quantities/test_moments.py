"""`SecondMoment` and `Variance`: cancellation, single samples, types."""

import pytest
import torch
from torch import nn

import pergrad
from pergrad.errors import PergradError
from tests.engine.exactness import Formula, numbers
from tests.quantities.oracle import losses


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("size", [3, 40])
def test_variance_survives_a_mean_that_outweighs_the_spread(size: int) -> None:
    """In float32 a difference of mean squares would have nothing left of it."""
    model = nn.Linear(4, 3, bias=False)
    x = 1000 + 0.1 * torch.randn(size, 4)
    with pergrad.record(model, pergrad.Variance(), pergrad.SecondMoment()) as (variance, squares):
        model(x).sum().backward()
    exact = x.double().var(0).expand(3, 4)
    torch.testing.assert_close(variance.result["weight"].double(), exact, rtol=1e-3, atol=0)
    mean = variance.mean["weight"].double()
    naive = (squares.result["weight"].double() / size - mean.square()) * size / (size - 1)
    assert ((naive - exact).abs() / exact).max() > 0.1


def test_variance_of_micro_batches_survives_it_too() -> None:
    model = nn.Linear(4, 3, bias=False)
    x = 1000 + 0.1 * torch.randn(12, 4)
    total = pergrad.Variance()
    for part in x.split([1, 5, 2, 4]):
        with pergrad.record(model, pergrad.Variance()) as some:
            model(part).sum().backward()
        total += some
    exact = x.double().var(0).expand(3, 4)
    torch.testing.assert_close(total.result["weight"].double(), exact, rtol=1e-3, atol=0)
    assert total.count == 12


def test_variance_of_one_sample_is_refused_and_its_mean_is_not() -> None:
    model, x = nn.Linear(4, 3).double(), numbers(1, 4)
    with pergrad.record(model, pergrad.Variance()) as variance:
        losses(model, x).sum().backward()
    assert variance.mean["weight"].shape == (3, 4)
    with pytest.raises(
        PergradError, match=r"batch of two or more, or add further batches with \+="
    ):
        _ = variance.result


def test_variance_of_equal_samples_is_zero() -> None:
    model, x = nn.Linear(4, 3).double(), numbers(1, 4).expand(5, 4)
    with pergrad.record(model, pergrad.Variance()) as variance:
        losses(model, x).sum().backward()
    for spread in variance.result.values():
        assert spread.abs().max() < 1e-25


def test_moments_of_a_low_precision_model_come_in_float32() -> None:
    """Also those of a parameter that the loss does not reach."""
    model = Formula(lambda m, x: m.body(x), body=nn.Linear(4, 3), idle=nn.Linear(1, 1)).bfloat16()
    x = torch.randn(3, 4).bfloat16()
    with pergrad.record(model, pergrad.Variance(), pergrad.SecondMoment()) as (variance, squares):
        model(x).sum().backward()
    for found in (variance.result, variance.mean, squares.result):
        assert {t.dtype for t in found.values()} == {torch.float32}
