"""Gradients without their length."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["directions", "peaks"]


def directions(rows: Floats) -> tuple[Floats, Floats]:  # (n, k) -> (n, k), (n,)
    """Each row divided by its length, in its own dtype, and the lengths in float64; rows of zero stay zero.

    Rows are scaled by their largest entry before they are squared: a float32 gradient of 1e20 has a length.

    >>> import numpy as np
    >>> units, lengths = directions(np.array([[3e30, 4e30], [0.0, 0.0]], dtype=np.float32))
    >>> units.round(6).tolist(), (lengths / 1e30).round(6).tolist()
    ([[0.6000000238418579, 0.800000011920929], [0.0, 0.0]], [5.0, 0.0])
    """
    largest = peaks(rows)[:, None]
    units = rows / np.where(largest > 0, largest, 1)
    lengths = np.sqrt(np.einsum("nk,nk->n", units, units))[:, None]
    units /= np.where(lengths > 0, lengths, 1)
    return units, (lengths.astype(np.float64) * largest.astype(np.float64))[:, 0]


def peaks(rows: Floats) -> Floats:  # (n, k) -> (n,)
    """The largest entry of each row, whatever its sign."""
    return np.maximum(rows.max(axis=1, initial=0.0), -rows.min(axis=1, initial=0.0))
