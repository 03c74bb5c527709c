"""Finds the samples that push the model's output on a sample towards its label, or away from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pergrad.attribution.directions import Directions, directions
from pergrad.attribution.matrices import Matrix
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
    index: Integers, sketch: Matrix | Directions, rows: Integers, *, each: int = 3
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
    pointing = directions(sketch)
    lengths = pointing.lengths
    samples, others, cosines = [], [], []
    for start in range(0, len(rows), _BLOCK):
        some = rows[start : start + _BLOCK]
        helpers, harmers = _strongest(pointing, some, each)
        strongest = np.concatenate([helpers[0], harmers[0]], axis=1)
        cosine = np.concatenate([helpers[1], -harmers[1]], axis=1)
        pushing = np.concatenate([helpers[1] > 0, harmers[1] > 0], axis=1)
        samples.append(np.repeat(some, pushing.sum(axis=1)))
        others.append(strongest[pushing])
        cosines.append(cosine[pushing])
    a, b = np.concatenate(samples), np.concatenate(others)
    cosine = np.concatenate(cosines).astype(np.float64)
    return Pushes(index[a], index[b], cosine * lengths[a] * lengths[b], cosine)


_Best = tuple[Integers, Floats]  # (b, each) columns and values, the highest first


def _strongest(pointing: Directions, rows: Integers, each: int) -> tuple[_Best, _Best]:
    """Returns the samples with the highest cosines to each of `rows`, and those with the lowest, negated."""
    # A fixed number of columns: the rounding of products of odd sizes depends on the number of threads.
    own = np.zeros((_BLOCK, pointing.shape[1]), dtype=pointing.dtype)
    own[: len(rows)] = pointing[rows]
    none: _Best = np.zeros((len(rows), 0), dtype=np.int64), np.zeros((len(rows), 0), own.dtype)
    helpers, harmers = none, none
    for some, units in pointing.blocks():
        found = np.ascontiguousarray((units @ own.T)[:, : len(rows)].T)
        inside = (rows >= some.start) & (rows < some.stop)
        found[np.flatnonzero(inside), rows[inside] - some.start] = 0.0
        helpers = _merged(helpers, found, some.start, each)
        harmers = _merged(harmers, -found, some.start, each)
    return helpers, harmers


def _merged(best: _Best, values: Floats, start: int, each: int) -> _Best:
    """Adds the columns of a block, which follow those before, to the best so far; ties keep their order."""
    highest = _highest(values, min(each, values.shape[1]))
    columns = np.concatenate([best[0], highest + start], axis=1)
    found = np.concatenate([best[1], np.take_along_axis(values, highest, axis=1)], axis=1)
    order = np.argsort(-found, axis=1, kind="stable")[:, :each]
    return np.take_along_axis(columns, order, axis=1), np.take_along_axis(found, order, axis=1)


def _highest(values: Floats, count: int) -> Integers:  # (b, n) -> (b, count)
    """Returns the columns of the `count` highest values per row, one argmax at a time: cheap for a few."""
    left = values.copy()
    found = np.empty((len(values), count), dtype=np.int64)
    for place in range(count):
        found[:, place] = left.argmax(axis=1)
        np.put_along_axis(left, found[:, [place]], -np.inf, axis=1)
    return found
