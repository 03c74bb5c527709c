"""`NoiseScale`: its formulas, its average over steps, and that its estimates are unbiased."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError, ScopeError
from tests.engine.exactness import numbers


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def model_of(size: int) -> nn.Module:
    """Whose gradient is the sample itself."""
    return nn.Linear(size, 1, bias=False).double()


def step(noise: pergrad.NoiseScale, x: Tensor, **options: bool) -> pergrad.NoiseScale:
    model = model_of(x.shape[1])
    with pergrad.record(model, noise, batch_size=len(x), **options):
        model(x).sum().backward()
    return noise


def estimates(x: Tensor) -> tuple[float, float]:
    trace = float(x.var(0).sum())
    return trace, float(x.mean(0).square().sum()) - trace / len(x)


def test_estimates_are_those_of_the_formulas() -> None:
    x = 1 + numbers(6, 5)
    for offload in (False, True):
        noise = step(pergrad.NoiseScale(), x, offload=offload)
        trace, mean = estimates(x)
        assert noise.trace == pytest.approx(trace, rel=1e-9)
        assert noise.squared_mean == pytest.approx(mean, rel=1e-9)
        assert noise.result == pytest.approx(trace / mean, rel=1e-9)


def test_estimates_have_no_bias() -> None:
    """Over 400 batches of 3: |G|² = 4, tr(Σ) = 4, each mean within 5 of its standard errors."""
    found = torch.tensor(
        [
            [noise.trace, noise.squared_mean]
            for noise in (step(pergrad.NoiseScale(), 1 + numbers(3, 4)) for _ in range(400))
        ]
    )
    error = found.std(0) / 20
    assert ((found.mean(0) - 4).abs() <= 5 * error).all()
    assert (error < 0.5).all()


def test_running_is_the_ratio_of_averages_over_the_steps() -> None:
    noise = pergrad.NoiseScale(decay=0.8)
    batches = [1 + numbers(size, 5) for size in (6, 3, 4)]
    traces, means = 0.0, 0.0
    for x in batches:
        step(noise, x)
        trace, mean = estimates(x)
        traces, means = 0.8 * traces + 0.2 * trace, 0.8 * means + 0.2 * mean
        assert noise.running == pytest.approx(traces / means, rel=1e-9)
    assert noise.result == pytest.approx(trace / mean, rel=1e-9)


def test_first_step_of_the_average_is_the_step_itself() -> None:
    noise = step(pergrad.NoiseScale(decay=0.99), 1 + numbers(4, 5))
    assert noise.running == pytest.approx(noise.result, rel=1e-9)


def test_one_sample_is_refused_until_others_are_added() -> None:
    x = 1 + numbers(3, 5)
    noise = step(pergrad.NoiseScale(), x[:1])
    for attribute in ("result", "trace", "squared_mean", "running"):
        with pytest.raises(PergradError, match=r"batch of two or more, or add further"):
            getattr(noise, attribute)
    noise += step(pergrad.NoiseScale(), x[1:])
    trace, mean = estimates(x)
    assert noise.result == pytest.approx(trace / mean, rel=1e-9)


def test_there_is_no_average_before_the_first_step() -> None:
    with pytest.raises(ScopeError, match="no result yet"):
        _ = pergrad.NoiseScale().running


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_decays_that_are_none_are_refused(decay: float) -> None:
    with pytest.raises(PergradError, match=r"decay must be in \[0, 1\)"):
        pergrad.NoiseScale(decay)


class _Twins:
    """A group of two ranks with the same samples."""

    def count(self, own: int) -> int:
        return 2 * own

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: 2 * t for name, t in tensors.items()}


def test_sums_over_ranks_are_those_of_all_samples() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    both, one = pergrad.NoiseScale(), pergrad.NoiseScale()
    for noise, batch in ((both, torch.cat([x, x])), (one, x)):
        with pergrad.record(model, noise):
            model(batch).square().sum().backward()
    sums = one.reduced(_Twins())
    assert sums.samples == 8
    torch.testing.assert_close(sums.estimates(), both._estimates())
