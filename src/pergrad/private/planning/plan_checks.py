"""Refuses plans that cannot be accounted for, in one sentence each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from pergrad.errors import PrivacyError
from pergrad.private.drawing.scheme import Sampling
from pergrad.private.planning.accounting import Accountant, Neighbours
from pergrad.private.planning.adaptive import Adaptive
from pergrad.private.planning.plain import is_integer, is_real

if TYPE_CHECKING:
    from pergrad.private.planning.plan import Plan

__all__ = [
    "LEAST_BOUND",
    "NoiseKind",
    "check_adaptive",
    "check_choices",
    "check_delta",
    "check_numbers",
    "check_sampling",
]

NoiseKind: TypeAlias = Literal["gaussian", "discrete"]
_NAMED_CLIPPING = ("flat", "per-layer", "automatic")
# Squares of float32 vanish below 1e-38: smaller norms are not known to a part in a million.
LEAST_BOUND = 1e-8
_MOST_COUNT = 1 << 53  # integers that float64 holds


def check_positive(name: str, value: Any, *, or_zero: bool = False) -> None:
    if (
        not is_real(value)
        or not (value >= 0 if or_zero else value > 0)
        or value > sys.float_info.max
    ):
        kind = "a number that is not negative" if or_zero else "a positive number"
        raise PrivacyError(f"{name} must be {kind}, got {value!r}")


def check_resolved(name: str, value: Any) -> None:
    """Refuses a bound so small that a sample's norm, of squares in float32, may be rounded to zero."""
    check_positive(name, value)
    if value < LEAST_BOUND:
        raise PrivacyError(
            f"{name} must be at least {LEAST_BOUND:g}, got {value!r}: norms of float32 gradients are not "
            "known to a part in a million below it, and a sample could add more than its bound"
        )


def check_numbers(plan: Plan) -> None:
    check_positive("noise_multiplier", plan.noise_multiplier, or_zero=True)
    check_positive("sample_rate", plan.sample_rate)
    if plan.sample_rate > 1:
        raise PrivacyError(
            f"sample_rate is a probability in (0, 1], got {plan.sample_rate!r}: divide the expected batch "
            "size by the number of records"
        )
    for name in ("steps", "bands", "population", "batch_cap"):
        value = getattr(plan, name)
        if value is None and name in ("population", "batch_cap"):
            continue
        if not is_integer(value) or not 1 <= value <= _MOST_COUNT:
            raise PrivacyError(f"{name} must be a positive integer, got {value!r}")
    bounds = plan.max_norm if isinstance(plan.max_norm, Mapping) else {"": plan.max_norm}
    if not bounds:
        raise PrivacyError(
            "max_norm has no bounds: give one number, or one for each pattern of names"
        )
    for pattern, bound in bounds.items():
        if not isinstance(pattern, str):
            raise PrivacyError(f"max_norm has bounds by patterns of names, got {pattern!r} as one")
        check_resolved(f"max_norm of {pattern!r}" if pattern else "max_norm", bound)
    if plan.expected_batch_size is not None:
        check_positive("expected_batch_size", plan.expected_batch_size)
    check_resolved("stability", plan.stability)
    check_positive("discretization", plan.discretization)
    if plan.delta is not None:
        check_delta(plan.delta, plan.population_estimate)


def check_delta(delta: Any, population: float | None) -> None:
    check_positive("delta", delta)
    if delta >= 1:
        raise PrivacyError(f"delta is a probability below 1, got {delta!r}")
    if population is not None and delta * population >= 1:
        raise PrivacyError(
            f"delta = {delta:g} is not below 1 / population = {1 / population:g}: at such a delta, "
            f"publishing one record as it is would count as private; take at most {0.1 / population:.1g}"
        )


def check_choices(plan: Plan) -> None:
    choices: dict[str, Any] = {
        "neighbours": (*get_args(Neighbours), None),
        "sampling": get_args(Sampling),
        "accountant": get_args(Accountant),
        "noise": get_args(NoiseKind),
    }
    for name, allowed in choices.items():
        if getattr(plan, name) not in allowed:
            raise PrivacyError(f"{name} must be one of {allowed}, got {getattr(plan, name)!r}")
    if not isinstance(plan.clipping, Adaptive) and plan.clipping not in _NAMED_CLIPPING:
        raise PrivacyError(
            f"clipping must be one of {_NAMED_CLIPPING} or Adaptive(...), got {plan.clipping!r}"
        )
    if isinstance(plan.max_norm, Mapping) and plan.clipping not in ("flat", "automatic"):
        raise PrivacyError(
            f"bounds by patterns cannot be combined with clipping={plan.clipping!r}: give one max_norm"
        )
    if plan.noise == "discrete" and (plan.bands > 1 or isinstance(plan.clipping, Adaptive)):
        raise PrivacyError(
            "noise='discrete' cannot be combined with bands or an adaptive bound, whose noise is not on a "
            "grid: use noise='gaussian'"
        )


def check_sampling(plan: Plan) -> None:
    if plan.sampling != "truncated" and plan.batch_cap is not None:
        raise PrivacyError("batch_cap needs sampling='truncated', which accounts for the cap")
    if plan.sampling in ("truncated", "shuffled"):
        if plan.population is None:
            raise PrivacyError(
                f"sampling={plan.sampling!r} needs the population: its account depends on the number of "
                "records"
            )
        if plan.neighbours == "add-remove":
            raise PrivacyError(
                f"sampling={plan.sampling!r} has a fixed number of records, so neighbours cannot be "
                "'add-remove': use 'replace-special' or 'replace-one'"
            )
    if plan.sampling == "shuffled":
        size, population = plan.expected_batch_size, plan.population
        assert size is not None
        assert population is not None
        if size != int(size) or not 1 <= size <= population:
            raise PrivacyError(
                f"shuffled batches need an integer expected_batch_size of at most {population}, got {size!r}"
            )
        if not math.isclose(size / population, plan.sample_rate, rel_tol=1e-6):
            raise PrivacyError(
                f"shuffled batches of {size:g} of {population} records have the sample_rate "
                f"{size / population:g}, got {plan.sample_rate:g}"
            )
    if plan.bands > 1:
        if plan.sampling != "poisson":
            raise PrivacyError(
                f"bands need sampling='poisson', from one group of records after the other; "
                f"{plan.sampling!r} has no account for correlated noise"
            )
        if plan.bands * plan.sample_rate > 1:
            raise PrivacyError(
                f"bands · sample_rate = {plan.bands * plan.sample_rate:g} is above 1: a batch comes from one "
                f"of {plan.bands} groups; take at most {int(1 / plan.sample_rate)} bands"
            )
        if plan.bands > plan.steps:
            raise PrivacyError(
                f"{plan.bands} bands are more than {plan.steps} steps: take fewer bands"
            )
        if isinstance(plan.clipping, Adaptive):
            raise PrivacyError(
                "an adaptive bound changes the noise from step to step; bands need a fixed one"
            )


def check_adaptive(plan: Plan, adaptive: Adaptive) -> None:
    if plan.expected_batch_size is None:
        raise PrivacyError(
            "adaptive clipping needs expected_batch_size, to turn a count into a share"
        )
    if plan.sampling == "shuffled":
        raise PrivacyError(
            "adaptive clipping needs Poisson batches: a count of a fixed batch is not covered"
        )
    noise = plan.count_noise
    assert noise is not None
    if plan.noise_multiplier and 2 * noise <= plan.noise_multiplier:
        raise PrivacyError(
            f"the count's noise {noise:g} leaves nothing for the gradients: it must be above half of the "
            f"noise_multiplier {plan.noise_multiplier:g}; {adaptive} with more noise, or a larger expected "
            "batch size"
        )
