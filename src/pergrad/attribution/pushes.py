"""Finds the samples that push the model's output on a sample towards its label, or away from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.samples import Floats, Integers

__all__ = ["Pushes", "pushes"]

_BLOCK = 64  # samples whose cosines with all others are in memory at a time


@dataclass(frozen=True)
class Pushes:
    """Pairs of a sample and another whose gradient pushes it the most; one row per pair.

    `dot` is <g_sample, g_other>, estimated from the sketches: a step with learning rate ε on the other sample
    changes the loss of this one by about -ε · dot. Positive helps, negative harms.
    """

    index: Integers  # (p,) the sample that is pushed
    other: Integers  # (p,) the sample that pushes
    dot: Floats  # (p,)
    cosine: Floats  # (p,)

    def __len__(self) -> int:
        return len(self.index)


def pushes(
    index: Integers, sketch: Floats | Directions, rows: Integers, *, each: int = 3
) -> Pushes:
    """Returns the `each` strongest helpers, then the `each` strongest harmers of each of `rows`, by cosine.

    Ordered by cosine, not by dot product: otherwise the few samples with the largest gradients would come
    first everywhere. A helper has a positive product, a harmer a negative one; there may be fewer than
    `each`.

    >>> import numpy as np
    >>> sketch = np.array([[1.0, 0.0], [2.0, 0.5], [-1.0, 0.0], [0.0, 3.0]])
    >>> found = pushes(np.array([10, 11, 12, 13]), sketch, np.array([0]), each=1)
    >>> found.index, found.other, found.dot
    (array([10, 10]), array([11, 12]), array([ 2., -1.]))
    """
    each = min(each, len(index))
    if len(rows) == 0 or each == 0:
        none = np.empty(0, dtype=np.int64)
        return Pushes(none, none, np.empty(0), np.empty(0))
    units, lengths = directions(sketch)
    samples, others, cosines = [], [], []
    for start in range(0, len(rows), _BLOCK):
        some = rows[start : start + _BLOCK]
        found = _cosines(units, some)
        strongest = np.concatenate([_highest(found, each), _highest(-found, each)], axis=1)
        cosine = np.take_along_axis(found, strongest, axis=1)
        pushing = np.concatenate([cosine[:, :each] > 0, cosine[:, each:] < 0], axis=1)
        samples.append(np.repeat(some, pushing.sum(axis=1)))
        others.append(strongest[pushing])
        cosines.append(cosine[pushing])
    a, b = np.concatenate(samples), np.concatenate(others)
    cosine = np.concatenate(cosines).astype(np.float64)
    return Pushes(index[a], index[b], cosine * lengths[a] * lengths[b], cosine)


def _highest(values: Floats, count: int) -> Integers:  # (b, n) -> (b, count)
    """Returns the columns of the `count` highest values per row, one argmax at a time: cheap for a few."""
    left = values.copy()
    found = np.empty((len(values), count), dtype=np.int64)
    for place in range(count):
        found[:, place] = left.argmax(axis=1)
        np.put_along_axis(left, found[:, [place]], -np.inf, axis=1)
    return found


def _cosines(units: Floats, rows: Integers) -> Floats:  # (n, k), (b,) -> (b, n)
    """Returns the cosines of `rows` with all samples; 0 for a sample with itself."""
    # A fixed number of columns: the rounding of products of odd sizes depends on the number of threads.
    some = np.zeros((_BLOCK, units.shape[1]), dtype=units.dtype)
    some[: len(rows)] = units[rows]
    found = np.ascontiguousarray((units @ some.T)[:, : len(rows)].T)
    found[np.arange(len(rows)), rows] = 0.0
    return found
