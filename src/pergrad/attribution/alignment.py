"""Compares each sample's gradient with the mean gradient."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats

__all__ = ["alignment"]

_BLOCK = 256  # samples summed in the sketch's dtype; the sum of the blocks is float64


def alignment(sketch: Matrix | Directions) -> Floats:  # (n, k) -> (n,)
    """cos(s_n, Σ_m s_m / N), from -1 (against the mean gradient) to 1 (along it); 0 where either is zero.

    >>> import numpy as np
    >>> alignment(np.array([[3.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]))
    array([ 1.,  1., -1.,  0.])
    """
    pointing = directions(sketch)
    lengths = pointing.lengths
    # Only the direction of the mean matters: scaling by the largest length prevents overflow.
    weights = (lengths / (lengths.max(initial=0.0) or 1.0)).astype(pointing.dtype)
    total = np.zeros(pointing.shape[1])
    for some, units in pointing.blocks():
        for part in blocks(len(units), _BLOCK):
            total += np.einsum("n,nk->k", weights[some][part], units[part])
    total /= float(np.linalg.norm(total)) or 1.0
    found = np.empty(len(pointing))
    for some, units in pointing.blocks():
        found[some] = units @ total.astype(units.dtype)
    return np.clip(found, -1.0, 1.0)
