"""Recognises a model that has learnt doubtful labels by heart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.samples import Integers

__all__ = ["Memorised", "memorised"]

_FEWEST = 5  # doubted labels that a statement needs
_MOST_OF = 0.5  # share of the doubted labels that the model predicts


@dataclass(frozen=True)
class Memorised:
    """Of the labels that the other samples doubt, how many the model itself predicts."""

    doubted: int
    predicted: int

    @property
    def is_so(self) -> bool:
        """Whether the model has learnt doubtful labels by heart: their losses look like any other."""
        return self.doubted >= _FEWEST and self.predicted > _MOST_OF * self.doubted


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
    same = predicted[of_interest] == labels[of_interest]
    return Memorised(len(of_interest), int(same.sum()))
