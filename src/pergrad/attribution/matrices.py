"""Reads a matrix of many rows block by block, from memory or a file; transforms rows as they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "Chosen", "Matrix", "blocks", "finite_rows", "held", "is_small"]

BLOCK = 4096  # rows in memory at a time
_HELD = 2**26  # bytes of a transformed matrix that is kept, rather than transformed at each reading


class Matrix(Protocol):
    """Rows that can be read by slices and by arrays of row numbers; an array of NumPy is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


def blocks(rows: int, size: int = BLOCK) -> Iterator[slice]:
    """Yields consecutive slices that cover the rows.

    >>> list(blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def finite_rows(matrix: Matrix) -> NDArray[np.bool_]:  # (n, ...) -> (n,)
    """Returns a mask of the rows whose entries are all finite."""
    found = np.empty(len(matrix), dtype=bool)
    for some in blocks(len(matrix)):
        found[some] = np.isfinite(matrix[some]).reshape(some.stop - some.start, -1).all(axis=1)
    return found


def is_small(matrix: Matrix) -> bool:
    """Whether the matrix may be in memory as a whole."""
    return math.prod(matrix.shape) * matrix.dtype.itemsize <= _HELD


def held(matrix: Matrix) -> Matrix:
    """Reads a small matrix once, for several passes over it; a large one stays as it is."""
    return matrix[:] if is_small(matrix) else matrix


@dataclass(frozen=True)
class Chosen:
    """The rows of a matrix where `where` is true; `part` picks one matrix of (n, parts, k).

    If `centred`, the mean of the chosen rows is subtracted, in their dtype.

    >>> import numpy as np
    >>> Chosen(np.array([[1.0], [2.0], [4.0]]), np.array([True, False, True]), centred=True)[0:2]
    array([[-1.5],
           [ 1.5]])
    """

    base: Matrix
    where: NDArray[np.bool_]
    part: int | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        rows = None if self.where.all() else np.flatnonzero(self.where)
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_mean", None)
        if self.centred and len(self):
            total = np.zeros(self.shape[1])
            for some in blocks(len(self)):
                total += self[some].sum(axis=0, dtype=np.float64)
            object.__setattr__(self, "_mean", (total / len(self)).astype(self.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), self.base.shape[-1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.base.dtype

    def __len__(self) -> int:
        rows = self._rows  # type: ignore[attr-defined]
        return len(self.where) if rows is None else len(rows)

    def __getitem__(self, rows: Any) -> Any:
        own = self._rows  # type: ignore[attr-defined]
        found = self.base[rows if own is None else own[rows]]
        if self.part is not None:
            found = found[:, self.part]
        mean = self._mean  # type: ignore[attr-defined]
        return found if mean is None else found - mean
