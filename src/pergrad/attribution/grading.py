"""How well a ranking finds samples that are known to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.samples import Floats, Integers
from pergrad.errors import PergradError

__all__ = ["Grade", "Within", "average_precision", "found_within", "grade"]

SHARES = (0.05, 0.10)  # how far down the ranking the known samples are counted


@dataclass(frozen=True)
class Within:
    """How many of the known samples are among the highest `share` of a ranking."""

    share: float
    size: int
    found: int
    found_by_loss: int


@dataclass(frozen=True)
class Grade:
    """A ranking against known answers, beside ranking by loss alone, which needs no gradients."""

    known: int
    within: tuple[Within, ...]
    average_precision: float
    average_precision_by_loss: float

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return {**asdict(self), "within": [asdict(row) for row in self.within]}


def grade(
    index: Integers,  # (n,)
    suspicion: Floats,  # (n,)
    loss: Floats,  # (n,)
    known_wrong: Sequence[int] | Integers,
    *,
    shares: Sequence[float] = SHARES,
) -> Grade:
    """Count the known samples near the top by suspicion and by loss; ties are broken by the row.

    Indices in `known_wrong` that are not in `index` (of a subset) are left out.

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
            f"none of the {len(known_wrong)} samples that are known to be wrong is among the {len(index)} "
            "that were looked at: known_wrong holds indices into the data set"
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
    """The rows from the highest score to the lowest; what is not finite comes first."""
    finite = np.isfinite(scores)
    return np.lexsort((np.arange(len(scores)), -np.where(finite, scores, 0.0), finite))


def found_within(scores: Floats, wrong: NDArray[np.bool_], size: int) -> int:
    """How many are wrong among the `size` highest scores."""
    return int(wrong[ranked(scores)[:size]].sum())


def average_precision(scores: Floats, wrong: NDArray[np.bool_]) -> float:
    """The mean, over the wrong samples, of the share of wrong ones from the top down to each.

    1.0 if all of them come first; about their share of the data for a random order.

    >>> import numpy as np
    >>> average_precision(
    ...     np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, False, True, False])
    ... ).__round__(3)
    0.833
    """
    hits = wrong[ranked(scores)]
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())
