"""Batches are drawn with the probabilities that the account assumes."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import Plan, PlanSampler
from pergrad.private.drawing.sampling import poisson_indices
from pergrad.private.drawing.streams import Streams

SEEDS = [0, 1, 2]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampler(size: int, seed: int = 0, **options: Any) -> PlanSampler:
    usual = {"noise_multiplier": 1.0, "sample_rate": 0.25, "steps": 2000, "max_norm": 1.0}
    return Plan(**(usual | options)).sampler(TensorDataset(torch.arange(size)), seeded(seed))


def inclusions(found: PlanSampler, size: int, steps: int) -> Tensor:
    """(steps, size): which record is in which batch."""
    table = torch.zeros(steps, size)
    for k in range(steps):
        table[k, found.drawn(k)] = 1
    return table


def chi_squared(observed: Tensor, expected: Tensor) -> float:
    """The p-value of counts that are approximately normal, each with its own variance."""
    return float(stats.chi2.sf(float(observed.square().div(expected).sum()), observed.numel()))


@pytest.mark.parametrize("cryptographic", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [0.3, 0.02])
def test_inclusions_and_pairs_are_independent(seed: int, rate: float, cryptographic: bool) -> None:
    size, draws = 12, 100_000
    streams = Streams(bytes([seed]) * 32, cryptographic=cryptographic)
    # Many batches of a few records are one long row of them.
    indices = poisson_indices(streams("batch", 0), size * draws, rate)
    table = torch.zeros(size * draws, dtype=torch.float64)
    table[indices] = 1
    table = table.view(draws, size)
    singles = table.sum(0) - draws * rate
    assert chi_squared(singles, torch.full((size,), draws * rate * (1 - rate))) > 1e-3
    centred = table - rate
    pairs = (centred.T @ centred)[torch.ones(size, size).triu(1).bool()]
    variance = draws * (rate * (1 - rate)) ** 2
    assert chi_squared(pairs, torch.full((len(pairs),), variance)) > 1e-3
    between = (centred[1:] * centred[:-1]).sum(0)  # one batch and the next
    assert chi_squared(between, torch.full((size,), variance)) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_of_batches_are_binomial(seed: int) -> None:
    found = sampler(60, seed)
    sizes = torch.tensor([len(found.drawn(k)) for k in range(4000)])
    at_most = torch.tensor([stats.binom.cdf(k, 60, 0.25) for k in range(61)])
    cuts = torch.tensor([12, 14, 15, 16, 18])
    found_below = torch.tensor([(sizes <= c).double().mean() for c in cuts])
    error = (found_below - at_most[cuts]).abs() * (4000**0.5)
    assert error.max() < 2.2  # Kolmogorov–Smirnov


@pytest.mark.parametrize("rate", [1e-9, 1e-7, 1e-3])
def test_small_rates_are_exact(rate: float) -> None:
    size = int(200 / rate)
    streams = Streams(b"k" * 32)
    counts = [len(poisson_indices(streams("batch", k), size, rate)) for k in range(200)]
    total = sum(counts)  # Poisson of 200 · 200
    assert stats.poisson.cdf(total, 40_000) > 1e-3
    assert stats.poisson.sf(total, 40_000) > 1e-3
    places = poisson_indices(streams("places", 0), size, rate).double() / size
    assert stats.kstest(places.numpy(), "uniform").pvalue > 1e-3


def test_a_rate_of_one_takes_all() -> None:
    assert sampler(7, sample_rate=1.0).drawn(3) == [*range(7)]


def test_empty_data_gives_empty_batches() -> None:
    assert sampler(0).drawn(0) == []


def test_a_truncated_batch_is_a_uniform_subset() -> None:
    options = {"sampling": "truncated", "population": 400, "sample_rate": 0.5, "batch_cap": 232}
    found = sampler(400, **options)
    sizes = [len(found.drawn(k)) for k in range(300)]
    assert max(sizes) <= 232
    tight = sampler(400, **(options | {"batch_cap": 240}))
    tight._scheme = tight._scheme.__class__("truncated", 0.5, 3000, 1, 20, 400)
    table = inclusions(tight, 400, 3000)
    assert (table.sum(1) == 20).all()
    assert [*tight.drawn(0)] == sorted(tight.drawn(0))
    p = 20 / 400
    assert chi_squared(table.sum(0) - 3000 * p, torch.full((400,), 3000 * p * (1 - p))) > 1e-3


def test_a_shuffled_pass_has_every_record_once_at_most() -> None:
    found = sampler(105, sampling="shuffled", population=105, sample_rate=10 / 105)
    first = [index for k in range(10) for index in found.drawn(k)]
    assert len(first) == len({*first}) == 100
    assert found.drawn(10) != found.drawn(0)
    assert found.drawn(3) == found.drawn(3)


def test_a_record_of_correlated_noise_is_in_every_bth_batch_at_most() -> None:
    found = sampler(200, bands=4, sample_rate=0.2)
    table = inclusions(found, 200, 400)
    for record in table.T:
        steps = record.nonzero()[:, 0]
        assert len({*(steps % 4).tolist()}) <= 1
    assert table.sum(1).mean() == pytest.approx(0.2 * 200, rel=0.1)


def test_batches_are_a_function_of_the_generator_and_of_the_step() -> None:
    a, b, other = sampler(50, 1), sampler(50, 1), sampler(50, 2)
    assert [a.drawn(k) for k in (5, 0, 5)] == [b.drawn(k) for k in (5, 0, 5)]
    assert [a.drawn(k) for k in range(5)] != [other.drawn(k) for k in range(5)]


def test_two_samplers_without_a_generator_differ() -> None:
    plan = Plan(noise_multiplier=1.0, sample_rate=0.5, steps=3, max_norm=1.0)
    data = TensorDataset(torch.arange(100))
    assert plan.sampler(data).drawn(0) != plan.sampler(data).drawn(0)


def test_an_iteration_yields_the_steps_that_remain() -> None:
    found = sampler(50, steps=7)
    assert len(found) == len([*found]) == 7
    for k, _ in enumerate(found):
        found.take(k)
        found.used(k)
        if k == 2:
            break
    assert [*found] == [found.drawn(k) for k in range(3, 7)]


def test_epochs_go_on_where_the_last_one_ended() -> None:
    plan = Plan(noise_multiplier=1.0, sample_rate=0.5, steps=5, max_norm=1.0)
    found = plan.sampler(TensorDataset(torch.arange(9)), seeded(0), steps_per_epoch=2)
    seen = []
    for _ in range(4):
        for indices in found:
            found.take(len(seen))
            found.used(len(seen))
            seen.append(indices)
    assert seen == [found.drawn(k) for k in range(5)]
    for wrong in (0, True, 2.0):
        with pytest.raises(PrivacyError, match="steps_per_epoch must be"):
            plan.sampler([1, 2], steps_per_epoch=wrong)
    assert len(plan.sampler([1, 2], steps_per_epoch=numpy.int64(2))) == 2


def test_an_iteration_that_another_has_replaced_is_refused() -> None:
    found = sampler(50, steps=7)
    old, new = iter(found), iter(found)
    next(old)
    next(new)
    with pytest.raises(PrivacyError, match="no longer the next ones"):
        next(old)
    found.move_to(4)
    with pytest.raises(PrivacyError, match="no longer the next ones"):
        next(new)
    assert [*found] == [found.drawn(k) for k in range(4, 7)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_data_loader_takes_the_sampler(workers: int) -> None:
    data = TensorDataset(torch.arange(40))
    plan = Plan(noise_multiplier=1.0, sample_rate=0.5, steps=4, max_norm=1.0)
    found = plan.sampler(data, seeded(3))
    loader = DataLoader(data, batch_sampler=found, num_workers=workers)
    assert [batch.tolist() for (batch,) in loader] == [found.drawn(k) for k in range(4)]
