"""Compares samples only with those in near buckets, where comparing all pairs would take too long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.directions import Directions
from pergrad.attribution.matrices import blocks
from pergrad.attribution.samples import Floats, Integers

__all__ = ["Buckets", "Recall"]

_PROBED = 8  # buckets that each sample is compared with
_ROUNDS = 4  # of k-means
_TRAINED_ON = 32  # samples for each centre
_CROWDED = 4  # times the mean size beyond which a bucket is split
_QUERIES = 1024  # samples compared with one bucket at a time
_AT_ONCE = 1 << 16  # pairs looked up at a time
_TRIED = 2048  # samples that the recall is measured on


@dataclass(frozen=True)
class Recall:
    """Of the near-duplicate pairs of some random samples, compared with all others, how many were found.

    `found` counts the pairs that were compared, `grouped` those whose samples are in one group, which others
    connect them to.
    """

    samples: int
    pairs: int
    found: int
    grouped: int

    @property
    def share(self) -> float | None:
        """Returns found / pairs; None if the samples have no near-duplicates."""
        return self.found / self.pairs if self.pairs else None

    def as_json(self) -> dict[str, Any]:
        """Returns plain numbers."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        if not self.pairs:
            return f"recall unknown: {self.samples:,} random samples have no pair to find"
        return (
            f"recall {self.found / self.pairs:.1%} of pairs, {self.grouped / self.pairs:.1%} in one "
            f"group, on {self.pairs:,} pairs of {self.samples:,} random samples"
        )


class Buckets:
    """Buckets of unit vectors around centres found by k-means; each vector lies in its nearest one.

    A vector is compared with the members of the eight buckets nearest to it. There are about 2√n buckets, so
    the comparisons grow as n √n. A crowded bucket, as of many copies of one sample, is split along a random
    direction, so that no bucket has more than four times its share.
    """

    def __init__(self, pointing: Directions, rows: Integers, seed: int = 0) -> None:
        self._pointing = pointing
        self._rows = rows  # of the vectors that are not zero, in increasing order
        generator = np.random.default_rng(seed)
        count = 1 << int(np.ceil(np.log2(2 * np.sqrt(max(1, len(rows))))))
        centres = self._centres(min(count, len(rows)), generator)
        self.probes = np.empty((len(rows), min(_PROBED, len(centres))), dtype=np.int32)
        aside = generator.normal(size=(centres.shape[1],)).astype(centres.dtype)
        places = np.empty(len(rows), dtype=np.float32)
        for some in blocks(len(rows)):
            units = pointing[rows[some]]
            self.probes[some] = _nearest(units @ centres.T, self.probes.shape[1])
            places[some] = units @ aside
        self.count = self._split(len(centres), places)

    def _centres(self, count: int, generator: np.random.Generator) -> Floats:  # (count, k)
        """Returns unit vectors that lie as densely as the samples do."""
        trained = min(len(self._rows), _TRAINED_ON * count)
        some = np.sort(generator.choice(len(self._rows), trained, replace=False))
        first = np.sort(generator.choice(trained, count, replace=False))
        centres = self._pointing[self._rows[some[first]]]
        for _ in range(_ROUNDS):
            total = np.zeros(centres.shape)
            for part in blocks(trained):
                units = self._pointing[self._rows[some[part]]]
                nearest = (units @ centres.T).argmax(axis=1)
                order = np.argsort(nearest, kind="stable")
                which, starts = np.unique(nearest[order], return_index=True)
                total[which] += np.add.reduceat(units[order], starts, axis=0)
            lengths = np.linalg.norm(total, axis=1, keepdims=True)
            centres = np.where(lengths > 0, total / np.maximum(lengths, 1e-30), centres)
            centres = centres.astype(self._pointing.dtype)
        return centres

    def _split(self, count: int, places: Floats) -> int:
        """Splits crowded buckets along `places`; returns the number of buckets then.

        Members of one part are compared with each other and with those of the next, so that the parts of a
        bucket of equal vectors stay connected. Other vectors are compared with the part of their place.
        """
        sizes = np.bincount(self.probes[:, 0], minlength=count)
        most = max(64, _CROWDED * len(places) // max(1, count))
        for crowded in np.flatnonzero(sizes > most).tolist():
            own = np.flatnonzero(self.probes[:, 0] == crowded)
            own = own[np.argsort(places[own], kind="stable")]
            parts = -(-len(own) // most)
            numbers = np.array([crowded, *range(count, count + parts - 1)])
            edges = places[own[[len(own) * part // parts for part in range(1, parts)]]]
            at, probe = np.nonzero(self.probes == crowded)
            self.probes[at, probe] = numbers[np.searchsorted(edges, places[at], side="right")]
            part = np.arange(len(own)) * parts // len(own)
            self.probes[own, 0] = numbers[part]
            if self.probes.shape[1] > 1:
                self.probes[own, -1] = numbers[(part + 1) % parts]
            count += parts - 1
        return count

    def pairs(self, threshold: float) -> Iterator[tuple[Integers, Integers, Floats]]:
        """Yields rows a < b whose cosine is at least the threshold, each pair once, and the cosines."""
        home = self.probes[:, 0]
        members, member_starts = _sorted_by(home, self.count)
        flat, starts = _sorted_by(self.probes.ravel(), self.count)
        for bucket in range(self.count):
            inside = members[member_starts[bucket] : member_starts[bucket + 1]]
            asking = flat[starts[bucket] : starts[bucket + 1]] // self.probes.shape[1]
            if len(inside) == 0 or len(asking) < 2:
                continue
            units = self._pointing[self._rows[inside]]
            for part in blocks(len(asking), _QUERIES):
                some = asking[part]
                cosines = self._pointing[self._rows[some]] @ units.T
                a, b = np.divmod(np.flatnonzero(cosines >= threshold), len(inside))
                found = cosines[a, b]
                a, b = some[a], inside[b]
                # Both may ask for each other: the smaller number speaks then.
                once = a < b
                late = np.flatnonzero(a > b)
                once[late] = ~(self.probes[b[late]] == home[a[late], None]).any(axis=1)
                a, b, found = a[once], b[once], found[once]
                yield self._rows[np.minimum(a, b)], self._rows[np.maximum(a, b)], found

    def recall(self, threshold: float, group: Integers, seed: int = 1) -> Recall:
        """Compares some random samples with all others, and counts the pairs that buckets compare.

        `group` has the number of each sample's group of near-duplicates, 0 for none.
        """
        tried = min(_TRIED, len(self._rows))
        some = np.sort(np.random.default_rng(seed).choice(len(self._rows), tried, replace=False))
        own, home = self._pointing[self._rows[some]], self.probes[:, 0]
        group = group[self._rows]
        pairs = found = grouped = 0
        for part in blocks(len(self._rows)):
            units = self._pointing[self._rows[part]]
            near = np.flatnonzero(own @ units.T >= threshold)
            for few in blocks(len(near), _AT_ONCE):
                a, b = np.divmod(near[few], len(units))
                a, b = some[a], b + part.start
                a, b = a[a != b], b[a != b]
                pairs += len(a)
                asked = (self.probes[a] == home[b, None]).any(axis=1)
                asked |= (self.probes[b] == home[a, None]).any(axis=1)
                found += int(asked.sum())
                grouped += int(((group[a] == group[b]) & (group[a] > 0)).sum())
        return Recall(tried, pairs, found, grouped)


def _nearest(cosines: Floats, count: int) -> Integers:  # (n, centres) -> (n, count)
    """Returns the columns of the highest cosines, the highest first."""
    some = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(cosines, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1)


def _sorted_by(buckets: NDArray[np.integer], count: int) -> tuple[Integers, Integers]:
    """Returns positions sorted by bucket, and where each bucket begins."""
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(buckets, minlength=count), out=starts[1:])
    return np.argsort(buckets, kind="stable"), starts
