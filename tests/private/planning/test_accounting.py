"""The account is that of dp-accounting, for every accountant and every kind of neighbours."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from pergrad.errors import PrivacyError
from pergrad.private import Adaptive, Plan

OPTIONS: dict[str, Any] = {"sample_rate": 0.01, "steps": 20, "max_norm": 1.0}


def shuffled(accountant: Any, neighbours: Any, noise: float = 2.0) -> float:
    plan = Plan(
        noise_multiplier=noise,
        sample_rate=0.1,
        steps=10,
        max_norm=1.0,
        sampling="shuffled",
        population=5000,
        expected_batch_size=500,
        accountant=accountant,
        neighbours=neighbours,
    )
    return plan.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_replaced_record_counts_as_much_as_half_the_noise(accountant: Any) -> None:
    assert shuffled(accountant, "replace-one") == pytest.approx(
        shuffled(accountant, "replace-special", noise=1.0), abs=1e-6
    )


@pytest.mark.parametrize("neighbours", ["replace-one", "replace-special"])
def test_the_looser_accountant_is_never_below_the_tight_one(neighbours: Any) -> None:
    assert shuffled("rdp", neighbours) >= shuffled("pld", neighbours)


# Calibration


@pytest.mark.parametrize(
    ("epsilon", "changes"),
    [
        (0.01, {}),
        (3.0, {"steps": 1}),
        (1.0, {"sample_rate": 1.0}),
        (2.0, {"accountant": "rdp"}),
        (2.0, {"bands": 4}),
        (3.0, {"clipping": Adaptive(), "expected_batch_size": 100}),
    ],
)
def test_calibration_returns_the_target_and_never_more(
    epsilon: float, changes: dict[str, Any]
) -> None:
    # Half of the coarse one, with which the search begins; test_plan calibrates at that of a plan.
    plan = Plan.calibrate(
        epsilon=epsilon, delta=1e-5, **OPTIONS | {"discretization": 5e-4} | changes
    )
    assert epsilon - 1e-4 <= plan.epsilon() <= epsilon


def test_a_target_beyond_all_that_can_leak_gives_the_least_noise() -> None:
    plan = Plan.calibrate(
        epsilon=3.0,
        delta=1e-5,
        **OPTIONS | {"sample_rate": 1e-9, "steps": 1, "discretization": 0.01},
    )
    assert plan.epsilon() == 0.0
    assert plan.noise_multiplier > 0


@pytest.mark.parametrize("epsilon", [numpy.float32(3.0), numpy.int64(3)])
def test_a_target_may_be_a_number_of_numpy(epsilon: Any) -> None:
    options = OPTIONS | {"discretization": 5e-4}
    expected = Plan.calibrate(epsilon=3, delta=1e-5, **options)
    assert Plan.calibrate(epsilon=epsilon, delta=numpy.float64(1e-5), **options) == expected


def test_noise_too_little_for_the_memory_of_an_account_is_refused() -> None:
    plan = Plan(noise_multiplier=1e-3, **OPTIONS)
    with pytest.raises(PrivacyError, match="too little for the PLD accountant"):
        plan.epsilon(1e-5)
    assert Plan(noise_multiplier=1e-3, accountant="rdp", **OPTIONS).epsilon(1e-5) > 1e5


def test_what_the_accountant_cannot_count_is_refused() -> None:
    with pytest.raises(PrivacyError, match="dp-accounting cannot count this plan"):
        Plan(noise_multiplier=1.0, **OPTIONS | {"sample_rate": 5e-324}).epsilon(1e-5)


def test_a_target_that_protects_nothing_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"epsilon = 1e\+06 protects nothing: take at most 100"):
        Plan.calibrate(epsilon=1e6, delta=1e-5, **OPTIONS)


def test_a_delta_that_the_accountant_cannot_resolve_is_refused() -> None:
    with pytest.raises(PrivacyError, match="does not resolve so small a delta"):
        Plan.calibrate(epsilon=1.0, delta=1e-15, **OPTIONS | {"discretization": 0.01})
