"""One number that says how much a sample deserves a look."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.grading import ranked
from pergrad.attribution.samples import Floats, Integers

__all__ = ["ranks", "suspicion"]


def suspicion(loss: Floats, norm: Floats, influence: Floats) -> Floats:  # (n,) each -> (n,)
    """The self-influence: how far one step on this sample alone moves its own loss; inf where not finite."""
    finite = np.isfinite(loss) & np.isfinite(norm) & np.isfinite(influence)
    return np.where(finite, influence, np.inf)


def ranks(scores: Floats) -> Integers:  # (n,) -> (n,)
    """1 for the highest score, which must be looked at first; ties go by the row.

    >>> import numpy as np
    >>> ranks(np.array([0.5, np.inf, 3.0]))
    array([3, 1, 2])
    """
    result = np.empty(len(scores), dtype=np.int64)
    result[ranked(scores)] = np.arange(1, len(scores) + 1)
    return result
