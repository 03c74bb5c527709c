"""Whether a sample pulls the model where the others pull it."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["alignment"]


def alignment(sketch: Floats) -> Floats:  # (n, k) -> (n,)
    """cos(s_n, Σ_m s_m / N), from -1 (against the mean gradient) to 1 (along it); 0 where either is zero.

    >>> import numpy as np
    >>> alignment(np.array([[3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
    array([ 1.,  1., -1.,  0.])
    """
    rows = np.asarray(sketch, dtype=np.float64)
    # Scaled by the largest entry, so that squares neither overflow nor vanish.
    largest = float(np.abs(rows).max(initial=0.0)) or 1.0
    rows = rows / largest
    total = rows.sum(axis=0)  # of the direction of the mean
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(total)
    cosines = np.divide(rows @ total, lengths, out=np.zeros(len(rows)), where=lengths > 0)
    return np.clip(cosines, -1.0, 1.0)
