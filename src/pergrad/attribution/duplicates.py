"""Finds pairs and groups of samples with near-identical gradients: to the model they are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pergrad.attribution.buckets import Buckets, Recall
from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats, Integers

__all__ = ["EXACT_UP_TO", "Duplicates", "near_duplicates"]

EXACT_UP_TO = 20_000  # samples; of more, only those in near buckets are compared
_WIDE = 4  # blocks of columns compared at once
_ROUNDING = 1e-4  # of a cosine in float32; candidates are compared again
_NEAR, _FURTHER, _FAR = 5, 10, 40  # neighbours whose distances say how close others usually are
_BY_CHANCE = 1e-3  # share of the samples that may be so close to another one by chance
_SAME = 1e-4  # distance of unit vectors that are the same, however close others are
_COPIES = 0.02  # largest distance in a group of more copies than the near neighbours
_DIRECTIONS = 64
_FEW_DIRECTIONS = 16  # compared first, for all pairs
_SHORTENED_FROM = 1024  # rows; finding the directions of fewer takes longer than it saves
_MANY = 0.1  # share of the pairs beyond which one product compares all of a block again
_CHECKED = 1 << 13  # pairs compared one by one at a time
_SAMPLED = 512  # rows that the directions are found from
_ITERATIONS = 2
_EVERY = 8  # rows among which a bound of a distance to neighbours is found
_AT_ONCE = 256  # rows compared with all others at once
_WAITING = 1 << 14  # pairs in memory before they are joined to groups


@dataclass(frozen=True)
class Duplicates:
    """Pairs of samples with near-identical gradients, the closest first, and the groups they form.

    `count` is the number of all pairs; only the closest are held when there are more than the limit. Two
    samples are in one group if a chain of pairs connects them; groups are numbered from 1, the largest first.
    `recall` is None if all pairs were compared; else it says how many pairs buckets of samples miss.
    """

    index_a: Integers  # (p,) the smaller index
    index_b: Integers  # (p,)
    cosine: Floats  # (p,)
    count: int
    group: Integers  # (n,) the number of a sample's group, 0 for none
    recall: Recall | None = None

    def __len__(self) -> int:
        return len(self.index_a)


def near_duplicates(
    index: Integers,  # (n,)
    sketch: Matrix | Directions,  # (n, k)
    *,
    threshold: float = 0.99,
    apart: float | None = None,
    block: int = 256,
    limit: int = 10_000,
    exact_up_to: int = EXACT_UP_TO,
) -> Duplicates:
    """Returns the pairs whose sketches have a cosine of at least `threshold`, whatever their lengths.

    At equal lengths a cosine c means |g_a - g_b| / |g| = √(2 - 2c): at 0.99 the two gradients differ by 14%
    of their length. The lengths are not compared: the gradient of the loss shrinks with the loss, so that two
    copies of a sample that a model has fitted may differ in length by any factor. The error of a sketched
    cosine near 1 is about (1 - c) √(2 / k), so short sketches are enough to find such pairs.

    If `apart` is given, and all pairs are compared, the two must also be closer than that share of the
    distance from either to its fifth-nearest sample: where many samples are alike, copies are those that are
    much closer still. In few dimensions samples often are so close by chance, so the share is smaller there.
    Of many copies all may be as close as the fifth: pairs that differ by less than 2% of their length are
    compared with the fortieth instead, and those by less than 0.01% count in any case.

    Zero gradients have no direction and are never duplicates. Up to `exact_up_to` samples all pairs are
    compared, but for those that are apart along a principal direction of all: two unit vectors are no
    closer in space than along one axis. One product compares `block` samples with at most four times as many.
    Of more samples, each is compared with those in the `Buckets` near it, and the result says how many pairs
    that misses.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.01], [9.0, 0.0]])
    >>> pairs = near_duplicates(np.array([4, 5, 6, 7]), rows)
    >>> list(zip(pairs.index_a.tolist(), pairs.index_b.tolist())), pairs.group
    ([(4, 7), (4, 6), (6, 7)], array([1, 0, 1, 1]))
    """
    pointing = directions(sketch)
    rows = np.flatnonzero(pointing.lengths > 0)
    found = _Found(len(index), limit)
    buckets = None if len(rows) <= max(1, exact_up_to) else Buckets(pointing, rows)
    if buckets is None:
        units = pointing[rows]
        around = None if apart is None else _Neighbours(units, apart)
        every = _all_pairs(units, threshold, block)
        for pairs, cosine in every if around is None else _together(every):
            if around is not None:
                is_copy = around.are_copies(pairs, cosine)
                pairs, cosine = pairs[:, is_copy], cosine[is_copy]
            found.add(rows[pairs], cosine)
    else:
        for a, b, cosine in buckets.pairs(threshold):
            found.add(np.stack([a, b]), cosine)
    pairs, cosine, group = found.finished()
    recall = None if buckets is None else buckets.recall(threshold, group)
    return Duplicates(
        index[pairs[0]], index[pairs[1]], np.clip(cosine, -1.0, 1.0), found.count, group, recall
    )


class _Neighbours:
    """Says how close to a row another one must be to be its copy; distances are computed when needed."""

    def __init__(self, units: Floats, apart: float) -> None:
        self._units = units
        self._squares = np.einsum("nk,nk->n", units, units, dtype=np.float64)
        self._known = np.full(len(units), np.nan)
        self._shares = self._shares_of_distance(apart)

    def are_copies(self, pairs: Integers, cosine: Floats) -> NDArray[np.bool_]:  # (2, p), (p,)
        """Returns which pairs are as close as copies of each other are."""
        # Lengths in float64: those of float32 are 1 only up to rounding, which a small distance would show.
        distance = np.sqrt(np.maximum(0.0, self._squares[pairs].sum(axis=0) - 2 * cosine))
        # Any rows bound the distance to the fifth: those of the pairs, then every eighth of all. They show
        # most rows to have five neighbours too close, which need no product with all.
        fifth = _fifths(pairs, distance, len(self._units))
        found = self._may_be_copies(pairs, distance, fifth)
        has_enough = len(self._units) > 2 * _NEAR * _EVERY
        missing = self._unknown(pairs[:, found]) if has_enough else np.empty(0, dtype=np.int64)
        for some in blocks(len(missing), _AT_ONCE):
            rows = missing[some]
            fifth[rows] = np.minimum(fifth[rows], self._distances(rows, (_NEAR,), _EVERY)[0])
        found &= self._may_be_copies(pairs, distance, fifth)
        pairs, distance = pairs[:, found], distance[found]
        missing = self._unknown(pairs)
        for some in blocks(len(missing), _AT_ONCE):
            near, far = self._distances(missing[some], (_NEAR, _FAR)) * self._shares[:, None]
            self._known[missing[some]] = np.maximum(near, np.minimum(far, _COPIES))
        found[found] = distance <= np.maximum(self._known[pairs].min(axis=0), _SAME)
        return np.asarray(found)

    def _may_be_copies(
        self, pairs: Integers, distance: Floats, fifth: Floats
    ) -> NDArray[np.bool_]:  # (2, p), (p,), (n,) -> (p,)
        """Returns the pairs that bounds of the distance to the fifth do not rule out."""
        at_most = np.maximum(self._shares[0] * fifth, _COPIES)
        return np.asarray(distance <= at_most[pairs].min(axis=0))

    def _unknown(self, pairs: Integers) -> Integers:
        """Returns the rows of the pairs whose own bound is not known yet."""
        rows = np.unique(pairs)
        return rows[np.isnan(self._known[rows])]

    def _shares_of_distance(
        self, most: float
    ) -> Floats:  # (2,) of the distance to _NEAR and to _FAR
        """Returns the shares of both distances within which another row is in 1 of 1,000 cases by chance.

        In d dimensions the nearest row is closer than the share t of the distance to the fifth for 4 t^d of
        the rows, and (r_5 / r_10)^d has the median 1/2. The median does not mind groups of copies.
        """
        if len(self._units) <= _FURTHER:
            return np.array([most, most])
        some = np.arange(len(self._units))[:: max(1, len(self._units) // _AT_ONCE)][:_AT_ONCE]
        near, further = np.maximum(self._distances(some, (_NEAR, _FURTHER)), _SAME)
        growth = float(np.median(np.log(further / near)))
        share = min(most, (_BY_CHANCE / (_NEAR - 1)) ** (growth / math.log(2)))
        return np.array([share, share * (_NEAR / _FAR) ** (growth / math.log(2))])

    def _distances(
        self, rows: Integers, which: Sequence[int], every: int = 1
    ) -> Floats:  # (len(which), n)
        """Returns the distances to the neighbours of those numbers, among all rows or every so many."""
        cosines = self._units[rows] @ self._units[::every].T
        own = np.flatnonzero(rows % every == 0)
        cosines[own, rows[own] // every] = -1.0
        nearest = torch.from_numpy(cosines).topk(min(max(which), cosines.shape[1])).values.numpy()
        found = nearest[:, [min(number, nearest.shape[1]) - 1 for number in which]]
        return np.sqrt(np.maximum(0.0, 2 - 2 * found.T.astype(np.float64)))


def _fifths(pairs: Integers, distance: Floats, rows: int) -> Floats:  # (2, p), (p,) -> (rows,)
    """Returns the fifth-smallest distance of each row in the pairs; inf if it is in fewer."""
    owner, far = pairs.ravel(), np.tile(distance, 2)
    order = np.lexsort((far, owner))
    owner, far = owner[order], far[order]
    starts = np.searchsorted(owner, np.arange(rows)) + _NEAR - 1
    found = np.full(rows, np.inf)
    has_five = starts < np.searchsorted(owner, np.arange(rows), side="right")
    found[has_five] = far[starts[has_five]]
    return found


class _Found:
    """Counts pairs, keeps the closest and joins all to groups."""

    def __init__(self, samples: int, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._parent = np.arange(samples)
        self._closest: tuple[Integers, Floats] = np.empty((2, 0), dtype=np.int64), np.empty(0)
        self._waiting: list[tuple[Integers, Floats]] = []
        self._held = 0

    def add(self, pairs: Integers, cosine: Floats) -> None:  # (2, p), the smaller first; (p,)
        if len(cosine) == 0:
            return
        self.count += len(cosine)
        self._waiting.append((pairs, cosine.astype(np.float64)))
        self._held += len(cosine)
        if self._held >= _WAITING:
            self._take()

    def finished(self) -> tuple[Integers, Floats, Integers]:
        """Returns the closest pairs, their cosines, and the number of each sample's group."""
        self._take()
        return *self._closest, _groups(self._parent)

    def _take(self) -> None:
        waiting, self._waiting, self._held = [self._closest, *self._waiting], [], 0
        pairs = np.concatenate([pairs for pairs, _ in waiting], axis=1)
        cosine = np.concatenate([cosine for _, cosine in waiting])
        del waiting
        _join(self._parent, pairs)
        best = np.lexsort((pairs[1], pairs[0], -cosine))[: self._limit]
        self._closest = pairs[:, best], cosine[best]


def _all_pairs(
    units: Floats, threshold: float, block: int
) -> Iterator[tuple[Integers, Floats]]:  # (2, p), (p,)
    """Yields the pairs of rows with a cosine of at least the threshold, by blocks.

    Pairs are compared by ever more numbers: by one axis, by the largest principal directions, by more of
    them, and by all.
    """
    inside = _coordinates(units)
    axis = int(inside.var(axis=0).argmax()) if len(inside) else 0
    order = np.argsort(inside[:, axis], kind="stable")
    inside, units = inside[order], units[order]
    few, more = (_shortened(units, inside, count) for count in (_FEW_DIRECTIONS, _DIRECTIONS))
    least = threshold - _ROUNDING
    for rows, columns in _bands(inside[:, axis], threshold, block):
        near = np.flatnonzero(few[rows] @ few[columns].T >= least)
        if len(near) > _MANY * (rows.stop - rows.start) * (columns.stop - columns.start):
            near = np.flatnonzero(more[rows] @ more[columns].T >= least)
        a, b = np.divmod(near, columns.stop - columns.start)
        a, b = a + rows.start, b + columns.start
        a, b = a[a < b], b[a < b]
        for some in blocks(len(a), _CHECKED):
            left, right = a[some], b[some]
            near = np.einsum("pk,pk->p", more[left], more[right]) >= least
            left, right = left[near], right[near]
            # Pair by pair: the rounding of the product depends on the place of a pair in its block.
            found = np.einsum("pk,pk->p", units[left], units[right], dtype=np.float64)
            near = found >= threshold
            yield np.sort(order[np.stack([left[near], right[near]])], axis=0), found[near]


def _coordinates(units: Floats) -> Floats:  # (n, k) -> (n, up to k)
    """Returns the first coordinates of the rows in an orthonormal basis, about their principal directions.

    Any basis would do. This one is found from some of the rows, by a few orthogonal iterations.
    """
    width = units.shape[1]
    if len(units) <= _SHORTENED_FROM:
        return units
    some = units[:: -(-len(units) // _SAMPLED)]
    moment = some.T @ some
    basis = np.eye(width, dtype=units.dtype)
    if width > 2 * _DIRECTIONS:
        basis = np.random.default_rng(0).normal(size=(width, _DIRECTIONS)).astype(units.dtype)
        for _ in range(_ITERATIONS):
            basis = np.linalg.qr(moment @ basis)[0]
    turned = np.linalg.eigh(basis.T @ moment @ basis)[1]
    return np.asarray(units @ (basis @ turned[:, ::-1]))


def _shortened(
    units: Floats, inside: Floats, count: int
) -> Floats:  # (n, k), (n, m) -> (n, up to k)
    """Returns rows of fewer numbers whose products are at least the cosines.

    They are the first coordinates, and the length of the rest: the product of two rests is at most that of
    their lengths.
    """
    if units.shape[1] <= 2 * count or len(units) <= _SHORTENED_FROM:
        return units
    inside = inside[:, :count]
    squares = np.einsum("nk,nk->n", inside, inside)
    rest = np.sqrt(np.maximum(0.0, 1 + _ROUNDING / 2 - squares)).astype(inside.dtype)
    return np.concatenate([inside, rest[:, None]], axis=1)


def _together(
    parts: Iterator[tuple[Integers, Floats]],
) -> Iterator[tuple[Integers, Floats]]:  # (2, p), (p,)
    """Joins the pairs of several blocks: distances to neighbours cost less for many rows at once."""
    waiting: list[tuple[Integers, Floats]] = []
    held = 0
    for part in parts:
        waiting.append(part)
        held += len(part[1])
        if held >= _WAITING:
            yield _joined(waiting)
            waiting, held = [], 0
    if held:
        yield _joined(waiting)


def _joined(parts: list[tuple[Integers, Floats]]) -> tuple[Integers, Floats]:
    if len(parts) == 1:
        return parts[0]
    pairs, cosines = zip(*parts, strict=True)
    return np.concatenate(pairs, axis=1), np.concatenate(cosines)


def _bands(along: Floats, threshold: float, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows and columns that cover every pair near each other along the axis."""
    farthest = np.sqrt(2 - 2 * threshold) + 2 * np.sqrt(_ROUNDING)
    for start in range(0, len(along), block):
        rows = slice(start, min(start + block, len(along)))
        last = int(np.searchsorted(along, along[rows.stop - 1] + farthest, side="right"))
        for column in range(start, last, _WIDE * block):
            yield rows, slice(column, min(column + _WIDE * block, last))


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
