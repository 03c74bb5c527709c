"""Finds pairs and groups of samples with near-identical gradients: to the model they are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.samples import Floats, Integers

__all__ = ["Duplicates", "near_duplicates"]

_WIDE = 4  # blocks of columns compared at once
_ROUNDING = 1e-4  # of a cosine in float32; candidates are compared again


@dataclass(frozen=True)
class Duplicates:
    """Pairs of samples with near-identical gradients, the closest first, and the groups they form.

    `count` is the number of all pairs; only the closest are held when there are more than the limit. Two
    samples are in one group if a chain of pairs connects them; groups are numbered from 1, the largest first.
    """

    index_a: Integers  # (p,) the smaller index
    index_b: Integers  # (p,)
    cosine: Floats  # (p,)
    count: int
    group: Integers  # (n,) the number of a sample's group, 0 for none

    def __len__(self) -> int:
        return len(self.index_a)


def near_duplicates(
    index: Integers,  # (n,)
    sketch: Floats | Directions,  # (n, k)
    *,
    threshold: float = 0.99,
    block: int = 64,
    limit: int = 10_000,
) -> Duplicates:
    """Returns the pairs whose sketches have a cosine of at least `threshold`, whatever their lengths.

    At equal lengths a cosine c means |g_a - g_b| / |g| = √(2 - 2c): at 0.99 the two gradients differ by 14%
    of their length. The lengths are not compared: the gradient of the loss shrinks with the loss, so that two
    copies of a sample that a model has fitted may differ in length by any factor. The error of a sketched
    cosine near 1 is about (1 - c) √(2 / k), so short sketches are enough to find such pairs.

    Two unit vectors are no closer along one axis than in space: samples are sorted along their principal
    direction, and only pairs that are near each other there are compared. One product compares `block`
    samples with at most four times as many. Zero gradients have no direction and are never duplicates.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.01], [9.0, 0.0]])
    >>> pairs = near_duplicates(np.array([4, 5, 6, 7]), rows)
    >>> list(zip(pairs.index_a.tolist(), pairs.index_b.tolist())), pairs.group
    ([(4, 7), (4, 6), (6, 7)], array([1, 0, 1, 1]))
    """
    units, lengths = directions(sketch)
    places = _along(_principal(units), units)
    order = np.argsort(places, kind="stable")
    order = order[lengths[order] > 0]
    along, units = places[order], units[order]
    pairs, count = np.empty((2, 0), dtype=np.int64), 0
    cosine: Floats = np.empty(0)
    parent = np.arange(len(index))
    for rows, columns in _bands(along, threshold, block):
        cosines = units[rows] @ units[columns].T
        a, b = np.divmod(np.flatnonzero(cosines >= threshold - _ROUNDING), cosines.shape[1])
        a, b = a + rows.start, b + columns.start
        a, b = a[a < b], b[a < b]
        # Pair by pair: the rounding of the product depends on the place of a pair in its block.
        found = np.einsum("pk,pk->p", units[a], units[b], dtype=np.float64)
        near = found >= threshold
        count += int(near.sum())
        ends = np.sort(order[np.stack([a[near], b[near]])], axis=0)
        _join(parent, ends)
        pairs, cosine = _closest(
            np.concatenate([pairs, ends], axis=1), np.concatenate([cosine, found[near]]), limit
        )
    cosine = np.clip(cosine, -1.0, 1.0)
    return Duplicates(index[pairs[0]], index[pairs[1]], cosine, count, _groups(parent))


def _principal(units: Floats) -> Floats:  # (n, k) -> (k,)
    """Approximates the direction along which the samples are spread the most, by a few power iterations."""
    centred = units - units.mean(axis=0, keepdims=True) if len(units) else units
    found: Floats = np.random.default_rng(0).normal(size=(units.shape[1],)).astype(units.dtype)
    for _ in range(8):
        found = centred.T @ (centred @ found)
        found /= float(np.linalg.norm(found)) or 1.0
    return found


def _along(direction: Floats, units: Floats) -> Floats:  # (k,), (n, k) -> (n,)
    return np.einsum("nk,k->n", units, direction)


def _bands(along: Floats, threshold: float, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows and columns that cover every pair near each other along the axis."""
    farthest = np.sqrt(2 - 2 * threshold) + 2 * np.sqrt(_ROUNDING)
    for start in range(0, len(along), block):
        rows = slice(start, min(start + block, len(along)))
        last = int(np.searchsorted(along, along[rows.stop - 1] + farthest, side="right"))
        for column in range(start, last, _WIDE * block):
            yield rows, slice(column, min(column + _WIDE * block, last))


def _closest(pairs: Integers, cosine: Floats, limit: int) -> tuple[Integers, Floats]:
    """Returns at most `limit` pairs, those with the largest cosines, sorted."""
    best = np.lexsort((pairs[1], pairs[0], -cosine))[:limit]
    return pairs[:, best], cosine[best]


def _join(parent: Integers, pairs: Integers) -> None:
    """Joins the trees of both ends of each pair; the root of a tree is its smallest row."""
    while True:
        roots = np.sort(_roots(parent)[pairs], axis=0)
        apart = roots[0] < roots[1]
        if not apart.any():
            return
        np.minimum.at(parent, roots[1][apart], roots[0][apart])


def _roots(parent: Integers) -> Integers:
    while not np.array_equal(above := parent[parent], parent):
        parent[:] = above
    return parent


def _groups(parent: Integers) -> Integers:
    """Numbers the trees of two rows or more from 1, the largest first."""
    roots, members, sizes = np.unique(_roots(parent), return_inverse=True, return_counts=True)
    numbers = np.zeros(len(roots), dtype=np.int64)
    large = np.flatnonzero(sizes > 1)
    numbers[large[np.lexsort((roots[large], -sizes[large]))]] = np.arange(1, len(large) + 1)
    return numbers[members]
