"""Plans count what they promise, and refuse what cannot be accounted for in one sentence."""

from __future__ import annotations

import copy
import math
from typing import Any, cast

import numpy
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import Adaptive, Plan

USUAL: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "sample_rate": 0.01,
    "steps": 100,
    "max_norm": 1.0,
}


def plan(**changes: Any) -> Plan:
    return Plan(**(USUAL | changes))


# sigma, q, steps, delta, epsilon by PLD at 1e-4, by Opacus's PRV
REFERENCE = [
    (1.5, 0.04, 2250, 1e-5, 6.768787, 6.779132),
    (1.3, 0.004, 3750, 1e-5, 0.833589, 0.843601),
    (0.7, 0.004, 11250, 1e-5, 5.431223, 5.441529),
    (3.0, 0.08192, 2500, 1e-5, 6.578904, 6.589230),
    (0.8, 1e-4, 100000, 1e-6, 0.248822, 0.253746),
    (10.0, 1.0, 100, 1e-5, 4.377178, None),
]


@pytest.mark.parametrize(("noise", "rate", "steps", "delta", "epsilon", "_"), REFERENCE)
def test_epsilon_is_the_reference_value(
    noise: float, rate: float, steps: int, delta: float, epsilon: float, _: float
) -> None:
    found = plan(noise_multiplier=noise, sample_rate=rate, steps=steps).epsilon(delta)
    assert found == pytest.approx(epsilon, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "rate", "steps", "delta", "_", "prv"), REFERENCE[:5])
def test_fine_epsilon_is_opacus_less_its_error(
    noise: float, rate: float, steps: int, delta: float, _: float, prv: float
) -> None:
    fine = plan(noise_multiplier=noise, sample_rate=rate, steps=steps, discretization=1e-5)
    assert fine.epsilon(delta) == pytest.approx(prv - 0.01, abs=5e-4)


def test_rdp_is_the_looser_account() -> None:
    tight, loose = (
        plan(noise_multiplier=1.5, sample_rate=0.04, steps=2250, accountant=name).epsilon(1e-5)
        for name in ("pld", "rdp")
    )
    assert loose == pytest.approx(7.3291, abs=1e-3)
    assert tight < loose


def test_replace_one_costs_more_than_add_remove() -> None:
    options = {"sample_rate": 256 / 50_000, "steps": 1000}
    assert plan(**options).epsilon(1e-5) == pytest.approx(0.886358, abs=1e-6)
    replaced = plan(**options, neighbours="replace-one").epsilon(1e-5)
    assert replaced == pytest.approx(1.357582, abs=1e-5)


def test_epsilon_of_a_run_that_stops_early_is_that_of_a_shorter_plan() -> None:
    assert plan().epsilon(1e-5, steps=40) == plan(steps=40).epsilon(1e-5)
    assert plan().epsilon(1e-5, steps=0) == 0
    with pytest.raises(PrivacyError, match="between 0 and the plan's 100, got 101"):
        plan().epsilon(1e-5, steps=101)


def test_no_noise_has_infinite_epsilon() -> None:
    assert plan(noise_multiplier=0.0).epsilon(1e-5) == math.inf


@pytest.mark.parametrize(
    ("epsilon", "sampling"),
    [(0.1, "poisson"), (3.0, "poisson"), (20.0, "poisson"), (2.0, "shuffled")],
)
def test_calibration_returns_the_target_and_never_more(epsilon: float, sampling: str) -> None:
    made = Plan.calibrate(
        epsilon=epsilon,
        delta=1e-6,
        sample_rate=0.02,
        steps=300,
        max_norm=1.0,
        population=5000,
        sampling=sampling,
    )
    assert epsilon - 1e-4 <= made.epsilon() <= epsilon


# Truncated and shuffled batches

MANY = {"sample_rate": 256 / 50_000, "steps": 1000, "population": 50_000}


def test_truncated_batches_have_their_own_account() -> None:
    assert plan(**MANY, sampling="truncated", batch_cap=320).epsilon(1e-5) == pytest.approx(
        0.939355, abs=1e-5
    )
    chosen = plan(**MANY, sampling="truncated")
    assert 340 < chosen.batch_cap < 380
    assert chosen.neighbours == "replace-special"
    assert chosen.epsilon(1e-5) == pytest.approx(plan(**MANY).epsilon(1e-5), abs=1e-4)


def test_a_tight_cap_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"exceeded by 0.02\d* of the batches.*at least 30\d"):
        plan(**MANY, sampling="truncated", batch_cap=288)


def test_shuffled_batches_have_the_account_without_amplification() -> None:
    made = plan(sample_rate=0.1, steps=60, population=1000, sampling="shuffled")
    assert made.epsilon(1e-5) == pytest.approx(12.8707, abs=1e-3)  # six passes
    assert made.epsilon(1e-5, steps=11) == made.epsilon(1e-5, steps=20)


# Refusals

BAD: list[tuple[dict[str, Any], str]] = [
    ({"sample_rate": 0.0}, "sample_rate must be a positive number, got 0.0"),
    ({"sample_rate": 1.5}, "sample_rate is a probability"),
    ({"sample_rate": math.nan}, "sample_rate must be"),
    ({"sample_rate": "0.1"}, "sample_rate must be"),
    ({"sample_rate": True}, "sample_rate must be"),
    ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
    ({"noise_multiplier": math.inf}, "noise_multiplier must be"),
    ({"steps": 0}, "steps must be a positive integer"),
    ({"steps": 2.0}, "steps must be a positive integer"),
    ({"steps": 10**400}, "steps must be a positive integer"),
    ({"noise_multiplier": 10**400}, "noise_multiplier must be"),
    ({"max_norm": 0}, "max_norm must be"),
    ({"max_norm": 1e-9}, "max_norm must be at least 1e-08"),
    ({"clipping": "automatic", "stability": 0}, "stability must be"),
    ({"clipping": "automatic", "stability": 1e-12}, "stability must be at least 1e-08"),
    ({"max_norm": {}}, "max_norm has no bounds"),
    ({"max_norm": {1: 1.0}}, "by patterns of names, got 1"),
    ({"max_norm": {"a.*": -1.0}}, "max_norm of 'a.\\*'"),
    ({"delta": 0.0}, "delta must be"),
    ({"delta": 1.0}, "delta is a probability below 1"),
    ({"delta": 1e-3, "population": 1000}, "not below 1 / population = 0.001"),
    ({"delta": 2e-3, "expected_batch_size": 10}, "not below 1 / population = 0.001"),
    ({"expected_batch_size": 0}, "expected_batch_size must be"),
    ({"population": 0}, "population must be a positive integer"),
    ({"sampling": "fixed"}, "sampling must be one of"),
    ({"neighbours": "friends"}, "neighbours must be one of"),
    ({"accountant": "prv"}, "accountant must be one of"),
    ({"clipping": "soft"}, "clipping must be one of"),
    ({"noise": "laplace"}, "noise must be one of"),
    ({"noise": "discrete", "bands": 2}, "noise='discrete' cannot be combined"),
    ({"batch_cap": 10}, "batch_cap needs sampling='truncated'"),
    ({"sampling": "truncated"}, "needs the population"),
    ({"sampling": "shuffled"}, "needs the population"),
    (
        {"sampling": "truncated", "population": 1000, "neighbours": "add-remove"},
        "cannot be 'add-remove'",
    ),
    (
        {"sampling": "shuffled", "population": 1000, "expected_batch_size": 20},
        "have the sample_rate 0.02",
    ),
    (
        {"sampling": "shuffled", "population": 999, "sample_rate": 0.1},
        "integer expected_batch_size",
    ),
    ({"bands": 0}, "bands must be a positive integer"),
    ({"bands": 101}, "bands · sample_rate"),
    ({"bands": 60, "steps": 50}, "more than 50 steps"),
    ({"bands": 2, "sampling": "shuffled", "population": 1000}, "no account for correlated"),
    ({"clipping": Adaptive()}, "needs expected_batch_size"),
    (
        {"clipping": Adaptive(noise=0.4), "expected_batch_size": 10},
        "leaves nothing for the gradients",
    ),
    ({"clipping": Adaptive(), "expected_batch_size": 10, "bands": 2}, "need a fixed one"),
    ({"clipping": "per-layer", "max_norm": {"*": 1.0}}, "cannot be combined"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD)
def test_a_bad_plan_is_refused_in_one_sentence(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason) as caught:
        plan(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantile": 2.0}, "quantile"),
        ({"quantile": None}, "quantile of an adaptive bound must be a number"),
        ({"rate": 0}, "rate"),
        ({"rate": "0.2"}, "rate of an adaptive bound must be a number"),
        ({"noise": 0}, "noise"),
        ({"noise": True}, "noise of an adaptive bound must be a number"),
    ],
)
def test_a_bad_adaptive_bound_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        Adaptive(**options)


def test_epsilon_without_a_delta_is_refused() -> None:
    with pytest.raises(PrivacyError, match="needs a delta"):
        plan().epsilon()


def test_calibration_refuses_what_it_finds_itself() -> None:
    with pytest.raises(PrivacyError, match="leave it out"):
        Plan.calibrate(epsilon=1, delta=1e-5, **USUAL)
    with pytest.raises(PrivacyError, match="epsilon must be a positive number"):
        Plan.calibrate(epsilon=-1, delta=1e-5, sample_rate=0.1, steps=10, max_norm=1.0)
    with pytest.raises(PrivacyError, match="epsilon must be a positive number, got True"):
        Plan.calibrate(epsilon=True, delta=1e-5, sample_rate=0.1, steps=10, max_norm=1.0)
    with pytest.raises(PrivacyError, match="delta must be a positive number, got None"):
        Plan.calibrate(epsilon=1, delta=None, sample_rate=0.1, steps=10, max_norm=1.0)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="arguments of Plan"):
        Plan.calibrate(epsilon=1, delta=1e-5, sample_rate=0.1, step=10, max_norm=1.0)


def test_data_that_the_plan_does_not_describe_is_refused() -> None:
    data = TensorDataset(torch.zeros(10, 1))
    with pytest.raises(PrivacyError, match="accounts for a population of 1000"):
        plan(sampling="truncated", population=1000).sampler(data)
    with pytest.raises(PrivacyError, match=r"delta = 0\.2 is not below one over"):
        plan(delta=0.2).loader(data)
    with pytest.raises(PrivacyError, match="map-style"):
        plan().sampler(type("Stream", (IterableDataset,), {"__iter__": iter})())


# State


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_norm": {"a.*": 1.0, "*": 2.0}},
        {"clipping": Adaptive(quantile=0.3), "expected_batch_size": 50},
        {"sampling": "truncated", "population": 1000},
        {"bands": 4},
    ],
)
def test_a_plan_returns_from_its_state(changes: dict[str, Any]) -> None:
    made = plan(**changes)
    state = made.state_dict()
    assert Plan.from_state_dict(state) == made
    assert copy.deepcopy(made) == made
    assert state["discretization"] == 1e-4


def test_a_bad_state_is_refused() -> None:
    for state in ({}, {"steps": 1, "noise_multiplier": 1, "more": 2}, 3):
        with pytest.raises(PrivacyError, match="not the state of a plan"):
            Plan.from_state_dict(state)
    whole = plan(clipping=Adaptive(noise=3.0), expected_batch_size=50).state_dict()
    for state in (
        {name: value for name, value in whole.items() if name != "max_norm"},
        whole | {"clipping": {"median": 1}},
    ):
        with pytest.raises(PrivacyError, match="is not complete"):
            Plan.from_state_dict(state)


def test_the_parts_of_an_adaptive_step_have_the_noise_of_the_whole() -> None:
    made = plan(clipping=Adaptive(noise=3.0), expected_batch_size=50)
    count, gradient = 2 * 3.0, made.gradient_noise_multiplier
    assert (count**-2 + gradient**-2) ** -0.5 == pytest.approx(1.0)
    assert gradient > 1.0


def test_bounds_of_groups_add_up_to_one_sensitivity() -> None:
    assert plan(max_norm={"a.*": 3.0, "*": 4.0}).sensitivity == pytest.approx(5.0)


def test_a_plan_keeps_its_bounds_when_the_caller_changes_them() -> None:
    bounds = {"*": 1.0}
    plan = Plan(**{**USUAL, "max_norm": bounds})
    bounds["*"] = 0.01
    assert plan.sensitivity == 1.0


def test_numbers_of_numpy_become_python_s() -> None:
    """A checkpoint holds the plan, and gives no others back."""
    given = {"noise_multiplier": numpy.float64(1.0), "steps": numpy.int64(7)}
    found = plan(**given, sample_rate=numpy.float32(0.25), max_norm={"*": numpy.float32(0.5)})
    told = found.state_dict()
    mine = [told[name] for name in ("noise_multiplier", "sample_rate", "steps")]
    assert [type(value) for value in (*mine, told["max_norm"]["*"])] == [float, float, int, float]
    assert found.epsilon(1e-5, steps=cast(int, numpy.int64(3))) == found.epsilon(1e-5, steps=3)
    quantile: Any = numpy.float64(0.25)
    assert type(Adaptive(quantile=quantile).quantile) is float
