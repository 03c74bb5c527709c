"""Bounds epsilon from below by one training run with canaries."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.planning.plain import is_real
from pergrad.runtime.caches import cached

__all__ = ["Claim", "one_run_audit"]

Claim: TypeAlias = Literal["dp", "f-dp"]
_TOLERANCE = 1e-7
_MOST = 200.0  # an epsilon that no audit needs to exceed


def one_run_audit(
    included: Iterable[float] | Tensor,
    excluded: Iterable[float] | Tensor,
    *,
    delta: float = 1e-6,
    significance: float = 0.05,
    claim: Claim = "dp",
    threshold: float | None = None,
) -> float:
    """Returns a lower bound on epsilon, from the scores of canaries that were in the data and of others.

    Each canary must have been put into the training data by the flip of a fair coin. All canaries whose score
    reaches a threshold are guessed to have been in; with probability 1 - significance, no training with a
    smaller epsilon allows as many right guesses (Steinke, Nasr and Jagielski, 2023). A thousand right guesses
    prove an epsilon of about 5.8 at most.

    Args:
        included: scores of the canaries that were in; a high score, such as a low loss, means "was in".
        excluded: scores of the canaries that were not.
        delta: of the claim.
        significance: the probability with which the bound may be wrong.
        claim: "dp" audits (epsilon, delta)-DP; "f-dp" audits the trade-off function of the Gaussian mechanism
            with this epsilon and delta, which proves more (Mahloujifar, Melis and Chaudhuri, 2024).
        threshold: decided before the scores were seen; by default the best one, for which the significance is
            divided by the number of thresholds tried.

    >>> from statistics import NormalDist
    >>> scores = [NormalDist().inv_cdf((k + 0.5) / 1000) for k in range(1000)]
    >>> print(f"{one_run_audit([s + 2 for s in scores], scores):.2f}")
    2.81
    >>> one_run_audit(scores, scores)
    0.0
    """
    here, gone = _scores("included", included), _scores("excluded", excluded)
    for name, value in {"significance": significance, "delta": delta}.items():
        if not is_real(value) or not 0 < value < 1:
            raise PrivacyError(f"{name} must be between 0 and 1, got {value!r}")
    if threshold is not None and (not is_real(threshold) or math.isnan(threshold)):
        raise PrivacyError(f"threshold must be a number, got {threshold!r}")
    if claim not in get_args(Claim):
        raise PrivacyError(f"claim must be one of {get_args(Claim)}, got {claim!r}")
    canaries = len(here) + len(gone)
    if threshold is not None:
        guesses = [(int((here >= threshold).sum()), int((gone >= threshold).sum()))]
    else:
        guesses = _guesses(here, gone)
        significance /= len(guesses)
    is_refuted = _refutes_dp if claim == "dp" else _refutes_gaussian
    best = 0.0
    # The most precise first: the others rarely improve on them.
    for right, wrong in sorted(guesses, key=lambda pair: -pair[0] / max(sum(pair), 1)):
        if right > wrong:

            def refuted(epsilon: float, right: int = right, wrong: int = wrong) -> bool:
                return is_refuted(epsilon, delta, significance, canaries, right, right + wrong)

            best = _largest(refuted, best)
    return best


def _scores(name: str, scores: Iterable[float] | Tensor) -> Tensor:
    try:
        found = torch.as_tensor(scores if isinstance(scores, Tensor) else [*scores])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PrivacyError(f"the scores of {name} canaries are not numbers: {error}") from None
    found = found.detach().cpu().double().flatten()
    if not len(found):
        raise PrivacyError(f"there are no scores of {name} canaries")
    if not found.isfinite().all():
        raise PrivacyError(f"the scores of {name} canaries are not all finite")
    return found


def _guesses(here: Tensor, gone: Tensor) -> list[tuple[int, int]]:
    """Returns (right, wrong) guesses of "was in" at the thresholds on the hull of the ROC curve."""
    thresholds = torch.cat([here, gone]).unique()  # ascending
    thresholds = torch.cat([thresholds, torch.tensor([torch.inf], dtype=thresholds.dtype)])
    missed = torch.searchsorted(here.sort().values, thresholds)
    rejected = torch.searchsorted(gone.sort().values, thresholds)
    hull: list[tuple[int, int]] = []
    for x, y in zip(missed.tolist(), rejected.tolist(), strict=True):
        while len(hull) > 1:
            (a, b), (c, d) = hull[-2:]
            if (d - b) * (x - c) > (y - d) * (c - a):
                break
            hull.pop()
        hull.append((x, y))
    return [(len(here) - x, len(gone) - y) for x, y in hull]


def _largest(refuted: Callable[[float], bool], low: float) -> float:
    """Returns the largest epsilon that is refuted, or `low` if none above it is."""
    if not refuted(low):
        return low
    high = max(1.0, 2 * low)
    while refuted(high):
        low, high = high, 2 * high
        if low > _MOST:
            return low
    while high - low > _TOLERANCE * max(1.0, low):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _refutes_dp(
    epsilon: float, delta: float, significance: float, canaries: int, right: int, guesses: int
) -> bool:
    """Whether (epsilon, delta)-DP makes `right` of `guesses` too unlikely: theorem 5.2 of Steinke et al."""
    special, stats = _scipy("special"), _scipy("stats")
    chance = float(special.expit(epsilon))  # of a right guess
    beta = float(stats.binom.sf(right - 1, guesses, chance))
    if beta > significance:
        return False
    fewer = torch.arange(1, right + 1).numpy()
    more = stats.binom.sf(right - fewer - 1, guesses, chance) - beta
    alpha = max(0.0, float((more / fewer).max(initial=0.0)))
    return beta + 2 * canaries * delta * alpha < significance


def _refutes_gaussian(
    epsilon: float, delta: float, significance: float, canaries: int, right: int, guesses: int
) -> bool:
    """Whether the Gaussian trade-off curve makes `right` of `guesses` too unlikely.

    Bounds, from `right` downwards, the probability mass of more right guesses (r) by that of fewer (h).
    """
    special = _scipy("special")
    shift = _gaussian_shift(epsilon, delta)
    r = significance * right / canaries
    h = significance * (guesses - right) / canaries
    for k in range(right - 1, -1, -1):
        least = float(special.ndtr(special.ndtri(r) - shift))
        if least <= h:
            break
        r = min(r + k / (guesses - k) * (least - h), 1.0)
        h = least
    return r + h > guesses / canaries


@cached("shifts of Gaussian mechanisms, by epsilon and delta", most=4096)
def _gaussian_shift(epsilon: float, delta: float) -> float:
    """Returns 1 / noise multiplier of the Gaussian mechanism with this epsilon and delta."""
    try:
        dp = importlib.import_module("dp_accounting")
    except ImportError as error:
        raise PrivacyError(
            "claim='f-dp' needs the package dp-accounting: pip install 'pergrad[private]'"
        ) from error
    return float(1 / dp.get_sigma_gaussian(epsilon, delta))


def _scipy(name: str) -> Any:
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise PrivacyError("the audit needs scipy: pip install 'pergrad[private]'") from error
