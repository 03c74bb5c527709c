"""Splits gradients into unit vectors and lengths, and shortens those that are far longer than usual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pergrad.attribution.matrices import Matrix, blocks, is_small
from pergrad.attribution.samples import Floats

__all__ = ["Directions", "Shortened", "directions", "largest_entries", "peaks", "shortened"]

# Multiple of the usual size beyond which a gradient is shortened. On `benchmarks.ranking` the longest of an
# ordinary data set is at most 8 times the usual one; an image that was not divided by 255 exceeds it.
_FAR = 10.0


class Directions:
    """Gradients, or their sketches, as unit vectors and lengths.

    Unit vectors of a large matrix are computed each time they are read; those of a small one are held.
    """

    def __init__(self, rows: Matrix) -> None:
        self._rows = rows
        self._units: Floats | None = np.empty(rows.shape, rows.dtype) if is_small(rows) else None
        self.lengths: Floats = np.empty(len(rows))  # (n,) float64
        for some in blocks(len(rows)):
            units, self.lengths[some] = _split(rows[some])
            if self._units is not None:
                self._units[some] = units

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._rows.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> Floats:  # (m, k) of length 1, or 0
        if self._units is not None:
            return self._units[rows]
        return _split(self._rows[rows])[0]

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """Yields slices and their unit vectors."""
        for some in blocks(len(self)):
            yield some, self[some]


def directions(rows: Matrix | Directions) -> Directions:
    """Divides each row by its length; unit rows have the dtype of the rows, lengths float64.

    Zero rows stay zero. `Directions` are returned unchanged, so that several findings can share them. Each
    row is scaled by its largest entry before it is squared: a float32 gradient of 1e20 does not overflow.

    >>> import numpy as np
    >>> found = directions(np.array([[3e30, 4e30], [0.0, 0.0]], dtype=np.float32))
    >>> found[:].round(6).tolist(), (found.lengths / 1e30).round(6).tolist()
    ([[0.6000000238418579, 0.800000011920929], [0.0, 0.0]], [5.0, 0.0])
    """
    return rows if isinstance(rows, Directions) else Directions(rows)


def _split(rows: Floats) -> tuple[Floats, Floats]:
    largest = peaks(rows)[:, None]
    units = rows / np.where(largest > 0, largest, 1)
    lengths = np.sqrt(np.einsum("nk,nk->n", units, units))[:, None]
    units /= np.where(lengths > 0, lengths, 1)
    return units, (lengths.astype(np.float64) * largest.astype(np.float64))[:, 0]


def peaks(rows: Floats) -> Floats:  # (n, k) -> (n,)
    """Returns max |entry| of each row."""
    return np.maximum(rows.max(axis=1, initial=0.0), np.abs(rows.min(axis=1, initial=0.0)))


def largest_entries(rows: Matrix) -> Floats:  # (n, k) -> (n,)
    """Returns max |entry| of each row of a matrix, in float64, block by block."""
    found = np.empty(len(rows))
    for some in blocks(len(rows)):
        found[some] = peaks(rows[some])
    return found


class Shortened:
    """Rows of a matrix, each multiplied by its factor as it is read."""

    def __init__(self, rows: Matrix, factors: Floats) -> None:
        self._rows = rows
        self._factors = factors.astype(rows.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._rows.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._rows.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Any) -> Floats:
        return np.asarray(self._rows[rows] * self._factors[rows][:, None])


def shortened(rows: Matrix) -> tuple[Matrix, Floats]:  # (n, k) -> (n, k), (n,)
    """Shortens the rows whose largest entry is over 10 times the median of these entries to that median.

    Also returns the factor of each row. If none is that long, the rows are returned as they are. A mean or a
    sum of squares over the rows would otherwise be that of the longest one alone. Rows must be finite.

    >>> import numpy as np
    >>> found, factors = shortened(np.array([[1.0], [2.0], [3.0], [-4000.0]]))
    >>> found[:].tolist(), factors.tolist()
    ([[1.0], [2.0], [3.0], [-2.5]], [1.0, 1.0, 1.0, 0.000625])
    """
    largest = largest_entries(rows)
    factors = np.ones(len(rows))
    usual = float(np.median(largest)) if len(rows) else 0.0
    if usual > 0:  # most gradients may be zero
        np.divide(usual, largest, out=factors, where=largest > _FAR * usual)
    return (Shortened(rows, factors), factors) if (factors < 1).any() else (rows, factors)
