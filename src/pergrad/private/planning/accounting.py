"""Counts epsilon by Google's dp-accounting; no accountant of our own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pergrad.errors import PrivacyError
from pergrad.private.drawing.scheme import Sampling
from pergrad.private.planning.plain import is_real
from pergrad.runtime.caches import cached

__all__ = ["Accountant", "Mechanism", "Neighbours", "epsilon_of", "noise_for"]

Neighbours: TypeAlias = Literal["add-remove", "replace-one", "replace-special"]
Accountant: TypeAlias = Literal["pld", "rdp"]

_RELATIONS = {
    "add-remove": "ADD_OR_REMOVE_ONE",
    "replace-one": "REPLACE_ONE",
    "replace-special": "REPLACE_SPECIAL",
}
_COARSE = 1e-3  # discretization of a first guess
_TAIL = 7.0  # deviations of the noise beyond which nothing is counted
_CLOSE = 5e-5  # how far calibrated noise may stay below its epsilon
_MOST_NOISE, _LEAST_NOISE = 1e6, 0.09  # the time of an account grows with 1 / noise²
_MOST_INTERVALS = 1e7  # of the privacy loss of one release: composing more takes gigabytes
_MOST_EPSILON = 100.0  # of a calibration: above, a record may change any probability e¹⁰⁰-fold


@dataclass(frozen=True)
class Mechanism:
    """`count` releases of a sum with Gaussian noise, over batches that are drawn as `sampling` says.

    rate: the probability of a record to be in a batch; for "shuffled", a release is one pass over the data.
    """

    sampling: Sampling | Literal["cyclic"]
    noise_multiplier: float
    rate: float
    count: int
    neighbours: Neighbours
    population: int | None = None  # truncated
    cap: int | None = None  # truncated
    accountant: Accountant = "pld"
    discretization: float = 1e-4


@cached("epsilons, by mechanism and delta", most=4096)
def epsilon_of(mechanism: Mechanism, delta: float) -> float:
    """Returns epsilon at `delta`; infinite without noise."""
    if mechanism.count == 0:
        return 0.0
    if mechanism.noise_multiplier == 0:
        return math.inf
    dp = _dp_accounting()
    accountant = _accountant(dp, mechanism)
    event = _event(dp, mechanism)
    if not accountant.supports(event):
        raise PrivacyError(
            f"the {mechanism.accountant.upper()} accountant cannot count {mechanism.sampling} batches for "
            f"{mechanism.neighbours} neighbours: use another accountant or another sampling"
        )
    _check_intervals(mechanism)
    try:
        return float(accountant.compose(event, mechanism.count).get_epsilon(delta))
    except ValueError as error:
        raise PrivacyError(f"dp-accounting cannot count this plan: {error}") from error


def _check_intervals(mechanism: Mechanism) -> None:
    """Refuses so little noise that the distribution of the privacy loss does not fit into memory."""
    inverse = 1 / mechanism.noise_multiplier
    intervals = inverse * (inverse / 2 + _TAIL) / mechanism.discretization
    if mechanism.accountant == "pld" and intervals > _MOST_INTERVALS:
        raise PrivacyError(
            f"noise_multiplier = {mechanism.noise_multiplier:g} is too little for the PLD accountant, whose "
            f"distribution would have {intervals:.1g} intervals of {mechanism.discretization:g}: add noise, "
            "or count with accountant='rdp'"
        )


def _event(dp: Any, mechanism: Mechanism) -> Any:
    noise = mechanism.noise_multiplier
    if mechanism.accountant == "rdp" and mechanism.neighbours == "replace-one":
        # A replaced record moves a sum by twice its bound. PLD knows it; RDP takes the noise as it is.
        noise /= 2
    gaussian = dp.GaussianDpEvent(noise)
    if mechanism.sampling in ("poisson", "cyclic"):
        return dp.PoissonSampledDpEvent(mechanism.rate, gaussian)
    if mechanism.sampling == "shuffled":
        return gaussian
    if mechanism.sampling == "truncated":
        return dp.TruncatedSubsampledGaussianDpEvent(
            mechanism.population, mechanism.rate, mechanism.cap, noise
        )
    raise PrivacyError(f"no account for {mechanism.sampling!r} batches")


def _accountant(dp: Any, mechanism: Mechanism) -> Any:
    relation = dp.NeighboringRelation[_RELATIONS[mechanism.neighbours]]
    if mechanism.accountant == "pld":
        pld = importlib.import_module("dp_accounting.pld")
        return pld.PLDAccountant(relation, value_discretization_interval=mechanism.discretization)
    rdp = importlib.import_module("dp_accounting.rdp")
    return rdp.RdpAccountant(neighboring_relation=relation)


def noise_for(mechanism: Mechanism, target: float, delta: float) -> float:
    """Finds the noise multiplier whose epsilon is at most the target, and by no more than 5e-5 below it."""
    if not (is_real(target) and 0 < target < math.inf):
        raise PrivacyError(f"epsilon must be a positive number, got {target!r}")
    if target > _MOST_EPSILON:
        raise PrivacyError(
            f"epsilon = {target:g} protects nothing: take at most {_MOST_EPSILON:g}, or give a plan the "
            "noise_multiplier that you want"
        )

    def epsilon(noise: float, **changes: Any) -> float:
        return epsilon_of(replace(mechanism, noise_multiplier=noise, **changes), delta)

    guess = 1.0
    if mechanism.accountant == "pld":  # a coarse account is fast, and not far off
        coarse = max(mechanism.discretization, _COARSE)
        guess = _root(target, lambda noise: epsilon(noise, discretization=coarse), 1.0, 2.0, 1e-3)
    return _root(target, epsilon, guess, 1.02, min(_CLOSE / target, 1e-3))


def _root(
    target: float, epsilon: Callable[[float], float], guess: float, factor: float, close: float
) -> float:
    """Returns a noise with epsilon in [target · (1 - close), target], searched outwards from a guess.

    log(epsilon) is nearly linear in log(noise): a safeguarded secant takes a few evaluations.
    """
    low = high = guess  # with epsilon(low) > target >= epsilon(high) once both are found
    above = below = math.log(max(epsilon(guess), 1e-12) / target)
    while below > 0:
        low, above, high = high, below, high * factor
        below, factor = math.log(max(epsilon(high), 1e-12) / target), factor**2
        if high > _MOST_NOISE:
            raise PrivacyError(
                f"no noise below {_MOST_NOISE:g} gives epsilon {target:g}: take fewer steps, a lower sample "
                "rate or a larger epsilon"
            )
    while above <= 0:
        if low <= _LEAST_NOISE:
            return low  # the target is more than the data can lose
        # Not in growing strides, which would pass into the slow accounts of little noise.
        high, below, low = low, above, max(low / factor, _LEAST_NOISE)
        above = math.log(max(epsilon(low), 1e-12) / target)
    for turn in range(60):
        if below >= math.log1p(-close):
            break
        is_secant = turn % 3 < 2 and math.isfinite(above)
        share = above / (above - below) if is_secant else 0.5
        # Aim a little past the root: the result must lie on its safe side.
        share = min(max(share + close / 4 / (above - below), 1e-3), 1 - 1e-3)
        middle = low ** (1 - share) * high**share
        if not low < middle < high:
            break
        found = math.log(max(epsilon(middle), 1e-12) / target)
        if found > 0:
            low, above = middle, found
        else:
            high, below = middle, found
    if not math.isfinite(above) and below < math.log1p(-close):
        raise PrivacyError(
            "the accountant does not resolve so small a delta: its epsilon jumps to infinity; take a larger "
            "delta, or accountant='rdp'"
        )
    return high


def _dp_accounting() -> Any:
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise PrivacyError(
            "the account needs the package dp-accounting: pip install 'pergrad[private]'"
        ) from error
