"""Compares each sample's gradient with the mean gradient."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.samples import Floats

__all__ = ["alignment"]

_BLOCK = 256  # samples summed in the sketch's dtype; the sum of the blocks is float64


def alignment(sketch: Floats | Directions) -> Floats:  # (n, k) -> (n,)
    """cos(s_n, Σ_m s_m / N), from -1 (against the mean gradient) to 1 (along it); 0 where either is zero.

    >>> import numpy as np
    >>> alignment(np.array([[3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
    array([ 1.,  1., -1.,  0.])
    """
    units, lengths = directions(sketch)
    # Only the direction of the mean matters: scaling by the largest length prevents overflow.
    weights = (lengths / (lengths.max(initial=0.0) or 1.0)).astype(units.dtype)
    total = np.zeros(units.shape[1])
    for start in range(0, len(units), _BLOCK):
        some = slice(start, start + _BLOCK)
        total += np.einsum("n,nk->k", weights[some], units[some])
    total /= float(np.linalg.norm(total)) or 1.0
    cosines = units @ total.astype(units.dtype)
    return np.clip(cosines.astype(np.float64), -1.0, 1.0)
