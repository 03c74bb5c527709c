"""Shortens gradients that are far longer than usual, so that they do not hide what the others say."""

from __future__ import annotations

from typing import Any

import numpy as np

from pergrad.attribution.directions import peaks
from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats

__all__ = ["Shortened", "shortened"]

# Multiple of the usual size beyond which a gradient is shortened. On `benchmarks.ranking` the longest of an
# ordinary data set is at most 8 times the usual one; an image that was not divided by 255 exceeds it.
_FAR = 10.0


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
    largest = np.empty(len(rows))
    for some in blocks(len(rows)):
        largest[some] = peaks(rows[some])
    factors = np.ones(len(rows))
    usual = float(np.median(largest)) if len(rows) else 0.0
    if usual > 0:  # most gradients may be zero
        np.divide(usual, largest, out=factors, where=largest > _FAR * usual)
    return (Shortened(rows, factors), factors) if (factors < 1).any() else (rows, factors)
