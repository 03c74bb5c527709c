"""Self-influence: how much a sample's own gradient moves the model's loss on that sample."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.directions import directions
from pergrad.attribution.samples import Floats

__all__ = ["self_influence"]

_FAR = 10.0  # times the 99th percentile of the lengths


def self_influence(sketch: Floats, *, damping: float = 0.1) -> Floats:  # (n, k) -> (n,)
    """s_n^T (S^T S / N + λ I)^-1 s_n, with λ = damping · tr(S^T S / N) / k.

    The matrix is the second moment of the gradients in the sketch, which stands for the curvature: a
    gradient in a direction that many samples share counts less than one that stands alone. Summed over
    the samples it is at most N k; a sample that is copied r times has about 1/r of the influence of one
    that stands alone. λ keeps directions that no sample uses from being divided by nothing.

    A gradient over 10 times as long as 99% of them counts into the matrix with that length alone: one sample
    that explodes would make all others look alike.

    Rows must be finite. Gradients that are all zero have no influence.

    >>> import numpy as np
    >>> shared, alone = [2.0, 0.0], [0.0, 2.0]
    >>> self_influence(np.array([shared, shared, shared, alone]), damping=1e-9).round(2)
    array([1.33, 1.33, 1.33, 4.  ])
    """
    samples, width = sketch.shape
    units, lengths = directions(sketch)
    limit = _FAR * float(np.quantile(lengths, 0.99)) if samples else 0.0
    counted = np.minimum(lengths, limit) if limit > 0 else lengths
    # Gradients of 1e200 or 1e-200 would leave float64 when squared; the result has no unit.
    largest = float(counted.max(initial=0.0))
    if largest == 0.0:
        return np.zeros(samples)
    # Products of all samples in the type of the sketch, which λ keeps well within; the rest in float64.
    rows = units * (counted / largest).astype(units.dtype)[:, None]
    moment = (rows.T @ rows).astype(np.float64) / samples
    scale = float(np.trace(moment)) / width
    lower = np.linalg.cholesky(moment + damping * scale * np.eye(width))
    solved = (units @ np.linalg.inv(lower).T.astype(units.dtype)).astype(np.float64)
    longer = np.minimum(lengths / largest, 1e150)  # whose square is finite
    return np.einsum("nk,nk->n", solved, solved) * np.square(longer)
