"""Scores how suspicious each sample is."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.grading import ranked
from pergrad.attribution.samples import Floats, Integers

__all__ = ["holding_half", "ranks", "suspicion"]


def suspicion(loss: Floats, influence: Floats) -> Floats:  # (n,), (n,) -> (n,)
    """(loss - lowest loss) · √self-influence: high loss, and a gradient in a direction that few share.

    √self-influence is the length of the gradient relative to what is usual in its direction. A sample with a
    high loss alone may be one of many hard samples. A sample with an unusual gradient alone may be rare but
    well fitted. Only both together are suspicious. The product has no parameters. The ranking does not change
    when the loss is shifted or scaled, and negative losses are allowed. A sample whose loss or influence is
    not finite scores inf.

    It ranks regression and language models, where no label can be doubted. For classifiers the label-free
    gradients of `label_errors` rank better than this and than the loss (`python -m benchmarks.ranking`).

    >>> import numpy as np
    >>> suspicion(np.array([0.0, 2.0, 2.0, np.nan]), np.array([9.0, 1.0, 9.0, 1.0]))
    array([ 0.,  2.,  6., inf])
    """
    known = np.isfinite(loss) & np.isfinite(influence)
    lowest = loss[known].min(initial=np.inf)
    scores = np.full(len(loss), np.inf)
    scores[known] = (loss[known] - lowest) * np.sqrt(influence[known])
    return scores


def ranks(scores: Floats) -> Integers:  # (n,) -> (n,)
    """Returns the rank of each score, 1 for the highest; ties are broken by row.

    >>> import numpy as np
    >>> ranks(np.array([0.5, np.inf, 3.0]))
    array([3, 1, 2])
    """
    result = np.empty(len(scores), dtype=np.int64)
    result[ranked(scores)] = np.arange(1, len(scores) + 1)
    return result


def holding_half(scores: Floats) -> int:  # (n,)
    """Returns how many of the highest scores make up half of the sum: about as many samples to look at first.

    Infinite scores are counted on top. Returns 0 if no score is positive.

    >>> import numpy as np
    >>> holding_half(np.array([5.0, 3.0, 1.0, 1.0, np.inf])), holding_half(np.ones(10))
    (2, 5)
    """
    finite = np.sort(scores[np.isfinite(scores)])[::-1]
    # Scaling by the largest keeps the sum finite.
    largest = float(finite[0]) if len(finite) > 0 else 0.0
    infinite = int((~np.isfinite(scores)).sum())
    if not largest > 0:
        return infinite
    held = np.cumsum(finite / largest)
    return infinite + int(np.searchsorted(held, held[-1] / 2 * (1 - 1e-12))) + 1
