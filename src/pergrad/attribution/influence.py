"""Self-influence: how much a sample's own gradient moves the model's loss on that sample."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.directions import peaks
from pergrad.attribution.samples import Floats
from pergrad.attribution.whitening import whitening

__all__ = ["self_influence"]

_BLOCK = 64
_FAR = 10.0  # times what 99% of the samples have


def self_influence(sketch: Floats, *, damping: float = 0.1) -> Floats:  # (n, k) -> (n,)
    """s_n^T (S^T S / N + λ I)^-1 s_n, with λ = damping · tr(S^T S / N) / k.

    The matrix is the second moment of the gradients in the sketch, which stands for the curvature: a
    gradient in a direction that many samples share counts less than one that stands alone. Summed over
    the samples it is at most N k; a sample that is copied r times has about 1/r of the influence of one
    that stands alone. λ keeps directions that no sample uses from being divided by nothing.

    A sketch whose largest entry is over 10 times that of 99% of the samples is shortened to that where it
    counts into the matrix: one sample that explodes would make all others look alike.

    Rows must be finite. Gradients that are all zero have no influence.

    >>> import numpy as np
    >>> shared, alone = [2.0, 0.0], [0.0, 2.0]
    >>> self_influence(np.array([shared, shared, shared, alone]), damping=1e-9).round(2)
    array([1.33, 1.33, 1.33, 4.  ])
    """
    samples, width = sketch.shape
    if samples == 0:
        return np.zeros(0)
    largest = peaks(sketch).astype(np.float64)
    if largest.max() < np.finfo(sketch.dtype).tiny:  # zero, or without digits left
        return np.zeros(samples)
    limit = _FAR * float(np.quantile(largest, 0.99)) or float(largest.max())
    kept = np.ones(samples)
    np.divide(limit, largest, out=kept, where=largest > limit)
    # Gradients of 1e200 or 1e-200 would leave float64 when squared; the result has no unit.
    unit = float((kept * largest).max())
    # Products of all samples in the type of the sketch, which λ keeps well within; the rest in float64.
    rows = sketch * (kept / unit).astype(sketch.dtype)[:, None]
    moment = (rows.T @ rows).astype(np.float64) / samples
    scale = float(np.trace(moment)) / width
    whitened = whitening(moment + damping * scale * np.eye(width))
    squares = np.zeros(samples)
    for start in range(0, width, _BLOCK):  # a triangular matrix, without most of its zeros
        stop = min(start + _BLOCK, width)
        solved = rows[:, :stop] @ whitened[start:stop, :stop].T.astype(rows.dtype)
        squares += np.einsum("nk,nk->n", solved, solved)
    return squares / np.square(np.maximum(kept, 1e-150))  # whose square stays finite
