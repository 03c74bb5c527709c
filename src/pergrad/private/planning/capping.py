"""Chooses the largest batch of truncated Poisson sampling."""

from __future__ import annotations

import importlib
from typing import Any

from pergrad.errors import PrivacyError

__all__ = ["cap_for", "check_cap"]

_CHOSEN = 1e-9  # probability of a batch above the chosen cap
_ALLOWED = 1e-3  # above it, truncation costs more privacy than the batch is worth


def cap_for(population: int, rate: float, probability: float = _CHOSEN) -> int:
    """Returns the smallest cap that a batch exceeds with at most this probability."""
    return max(1, int(_binomial().isf(probability, population, rate)))


def check_cap(cap: int, population: int, rate: float) -> None:
    """Refuses a cap that many batches exceed: whether a record is in depends on the others then."""
    exceeded = float(_binomial().sf(cap, population, rate))
    if exceeded > _ALLOWED:
        raise PrivacyError(
            f"batch_cap={cap} is exceeded by {exceeded:.2g} of the batches, and each of them doubles the "
            f"sensitivity: take at least {cap_for(population, rate, _ALLOWED)}, or leave it out for "
            f"{cap_for(population, rate)}"
        )


def _binomial() -> Any:
    try:
        return importlib.import_module("scipy.stats").binom
    except ImportError as error:
        raise PrivacyError(
            "truncated batches need scipy: pip install 'pergrad[private]'"
        ) from error
