"""Recognises a model that has learnt doubtful labels by heart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.samples import Integers

__all__ = ["Memorised", "memorised"]

_FEWEST = 5  # doubted labels that a statement needs
_MOST_OF = 0.5  # share of the doubted labels that the model predicts
# Share of all labels that it predicts: one that predicts fewer has learnt little by heart, and agrees with
# doubted labels by chance. On `benchmarks.ranking` models that have memorised labels predict 95% or more.
_FITTED = 0.9


@dataclass(frozen=True)
class Memorised:
    """Of the labels that the other samples doubt, how many the model itself predicts."""

    doubted: int
    predicted: int
    share: float  # of all labels, those that the model predicts

    @property
    def is_so(self) -> bool:
        """Whether the model has learnt doubtful labels by heart: their losses look like any other."""
        if self.doubted < _FEWEST or self.share < _FITTED:
            return False
        return self.predicted > _MOST_OF * self.doubted


def memorised(
    doubted: NDArray[np.bool_], predicted: Integers, labels: Integers, rows: Integers
) -> Memorised:
    """Counts the doubted labels among `rows`, and those of them that the model predicts.

    >>> import numpy as np
    >>> doubted = np.array([True] * 6 + [False] * 4)
    >>> labels = np.arange(10) % 2
    >>> memorised(doubted, labels, labels, np.arange(10)).is_so
    True
    """
    of_interest = rows[doubted[rows]]
    same = predicted == labels
    share = float(same[labels >= 0].mean()) if (labels >= 0).any() else 0.0
    return Memorised(len(of_interest), int(same[of_interest].sum()), share)
