"""Measures how well a ranking finds samples that are known to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.samples import Floats, Integers
from pergrad.errors import PergradError

__all__ = ["Grade", "Within", "average_precision", "found_within", "grade"]

SHARES = (0.05, 0.10)  # top shares of the ranking in which known samples are counted


@dataclass(frozen=True)
class Within:
    """Counts of known samples in the top `share` of a ranking."""

    share: float
    size: int
    found: int
    found_by_loss: int


@dataclass(frozen=True)
class Grade:
    """Grades of a ranking by suspicion and of the baseline, a ranking by loss alone."""

    known: int
    within: tuple[Within, ...]
    average_precision: float
    average_precision_by_loss: float

    def as_json(self) -> dict[str, Any]:
        """Returns plain dicts, lists and numbers."""
        return {**asdict(self), "within": [asdict(row) for row in self.within]}


def grade(
    index: Integers,  # (n,)
    suspicion: Floats,  # (n,)
    loss: Floats,  # (n,)
    known_wrong: Sequence[int] | Integers,
    *,
    shares: Sequence[float] = SHARES,
) -> Grade:
    """Counts the known samples near the top by suspicion and by loss; ties are broken by row.

    Ignores indices in `known_wrong` that are not in `index`, as in an audit of a subset.

    >>> import numpy as np
    >>> index = np.array([0, 1, 2, 3])
    >>> found = grade(
    ...     index, np.array([4.0, 1, 2, 3]), np.array([1.0, 2, 3, 4]), [0, 3], shares=[0.5]
    ... )
    >>> found.within[0].found, found.within[0].found_by_loss, found.average_precision
    (2, 1, 1.0)
    """
    wrong = np.isin(index, np.asarray(known_wrong, dtype=np.int64))
    if not wrong.any():
        raise PergradError(
            f"none of the {len(known_wrong)} samples in known_wrong is among the {len(index)} audited "
            "samples: known_wrong must hold indices into the data set"
        )
    within = []
    for share in shares:
        size = round(share * len(index))
        by_suspicion, by_loss = (found_within(s, wrong, size) for s in (suspicion, loss))
        within.append(Within(share, size, by_suspicion, by_loss))
    return Grade(
        int(wrong.sum()),
        tuple(within),
        average_precision(suspicion, wrong),
        average_precision(loss, wrong),
    )


def ranked(scores: Floats) -> Integers:  # (n,) -> (n,)
    """Returns the rows from the highest score to the lowest; scores that are not finite come first."""
    finite = np.isfinite(scores)
    return np.lexsort((np.arange(len(scores)), -np.where(finite, scores, 0.0), finite))


def found_within(scores: Floats, wrong: NDArray[np.bool_], size: int) -> int:
    """Returns the number of wrong samples among the `size` highest scores."""
    return int(wrong[ranked(scores)[:size]].sum())


def average_precision(scores: Floats, wrong: NDArray[np.bool_]) -> float:
    """Returns the mean precision at the rank of each wrong sample.

    It is 1.0 if all wrong samples come first, and about their share of the data for a random order.

    >>> import numpy as np
    >>> average_precision(
    ...     np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, False, True, False])
    ... ).__round__(3)
    0.833
    """
    hits = wrong[ranked(scores)]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())
