"""Splits gradients into unit vectors and lengths."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["Directions", "directions", "peaks"]


class Directions(NamedTuple):
    """Gradients, or their sketches, as unit vectors and lengths."""

    units: Floats  # (n, k) of length 1, or 0
    lengths: Floats  # (n,) float64


def directions(rows: Floats | Directions) -> Directions:
    """Divides each row by its length; returns unit rows in their dtype and lengths in float64.

    Zero rows stay zero. `Directions` are returned unchanged, so that several findings can share them. Each
    row is scaled by its largest entry before it is squared: a float32 gradient of 1e20 does not overflow.

    >>> import numpy as np
    >>> units, lengths = directions(np.array([[3e30, 4e30], [0.0, 0.0]], dtype=np.float32))
    >>> units.round(6).tolist(), (lengths / 1e30).round(6).tolist()
    ([[0.6000000238418579, 0.800000011920929], [0.0, 0.0]], [5.0, 0.0])
    """
    if isinstance(rows, Directions):
        return rows
    largest = peaks(rows)[:, None]
    units = rows / np.where(largest > 0, largest, 1)
    lengths = np.sqrt(np.einsum("nk,nk->n", units, units))[:, None]
    units /= np.where(lengths > 0, lengths, 1)
    return Directions(units, (lengths.astype(np.float64) * largest.astype(np.float64))[:, 0])


def peaks(rows: Floats) -> Floats:  # (n, k) -> (n,)
    """Returns max |entry| of each row."""
    return np.maximum(rows.max(axis=1, initial=0.0), np.abs(rows.min(axis=1, initial=0.0)))
