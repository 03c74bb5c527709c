"""Finds pairs of samples with near-identical gradients, which train the model in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.samples import Floats, Integers

__all__ = ["Duplicates", "near_duplicates"]

_WIDE = 4  # blocks of columns compared at once


@dataclass(frozen=True)
class Duplicates:
    """Pairs of samples with near-identical gradients, the closest first.

    `count` is the number of all pairs; only the closest are held when there are more than the limit.
    """

    index_a: Integers  # (p,) the smaller index
    index_b: Integers  # (p,)
    cosine: Floats  # (p,)
    count: int

    def __len__(self) -> int:
        return len(self.index_a)


def near_duplicates(
    index: Integers,  # (n,)
    norm: Floats,  # (n,)
    sketch: Floats | Directions,  # (n, k)
    *,
    threshold: float = 0.99,
    block: int = 64,
    limit: int = 10_000,
) -> Duplicates:
    """Returns the pairs with a cosine of their sketches, and a ratio of their norms, of at least `threshold`.

    At equal norms a cosine c means |g_a - g_b| / |g| = √(2 - 2c): at 0.99 the two gradients differ by 14% of
    their length. The error of a sketched cosine near 1 is about (1 - c) √(2 / k), so short sketches are
    enough to find such pairs. Near-identical gradients have near-identical norms: samples are sorted by norm,
    and only pairs with a ratio of norms above `threshold` are compared, a small part of the N² / 2 pairs. One
    product compares `block` samples with at most four times as many. Zero gradients have no direction and are
    never duplicates.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.01], [9.0, 0.0]])
    >>> pairs = near_duplicates(np.array([4, 5, 6, 7]), np.linalg.norm(rows, axis=1), rows)
    >>> pairs.index_a, pairs.index_b, pairs.count
    (array([4]), array([6]), 1)
    """
    units, lengths = directions(sketch)
    order = np.argsort(norm, kind="stable")
    order = order[(norm[order] > 0) & (lengths[order] > 0)]
    norms = norm[order]
    units = units[order]
    pairs, cosine, count = np.empty((2, 0), dtype=np.int64), np.empty(0, dtype=units.dtype), 0
    for rows, columns in _bands(norms, threshold, block):
        cosines = units[rows] @ units[columns].T
        a, b = np.divmod(np.flatnonzero(cosines >= threshold), cosines.shape[1])
        found = cosines[a, b]
        a, b = a + rows.start, b + columns.start
        near = (a < b) & (norms[a] >= threshold * norms[b])
        count += int(near.sum())
        pairs = np.concatenate([pairs, order[np.stack([a[near], b[near]])]], axis=1)
        pairs, cosine = _closest(pairs, np.concatenate([cosine, found[near]]), limit)
    ends = np.sort(index[pairs], axis=0)
    by_closeness = np.lexsort((ends[1], ends[0], -cosine))
    cosine = np.clip(cosine[by_closeness].astype(np.float64), -1.0, 1.0)
    return Duplicates(ends[0][by_closeness], ends[1][by_closeness], cosine, count)


def _bands(norms: Floats, threshold: float, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows and columns, sorted by norm, that cover every pair with close enough norms."""
    for start in range(0, len(norms), block):
        rows = slice(start, min(start + block, len(norms)))
        near = int(np.searchsorted(norms, norms[rows.stop - 1] / threshold, side="right"))
        # Whole blocks only: the rounding of products of odd sizes depends on the number of threads.
        last = min(start + -(-(near - start) // block) * block, len(norms))
        for column in range(start, last, _WIDE * block):
            yield rows, slice(column, min(column + _WIDE * block, last))


def _closest(pairs: Integers, cosine: Floats, limit: int) -> tuple[Integers, Floats]:
    """Returns the `limit` pairs with the largest cosines."""
    if len(cosine) <= limit:
        return pairs, cosine
    best = np.argsort(-cosine, kind="stable")[:limit]
    return pairs[:, best], cosine[best]
