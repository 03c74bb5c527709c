"""Which samples push the model's answer on a sample towards its label, and which away from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pergrad.attribution.directions import directions
from pergrad.attribution.samples import Floats, Integers

__all__ = ["Pushes", "pushes"]


@dataclass(frozen=True)
class Pushes:
    """For some samples, the others whose gradients push them the most; one row a pair.

    `dot` is <g_sample, g_other>, estimated from the sketches: a step of learning rate ε on the other sample
    changes the loss of this one by about -ε · dot. Positive: it helps; negative: it harms.
    """

    index: Integers  # (p,) the sample that is pushed
    other: Integers  # (p,) the sample that pushes
    dot: Floats  # (p,)
    cosine: Floats  # (p,)

    def __len__(self) -> int:
        return len(self.index)


def pushes(index: Integers, sketch: Floats, rows: Integers, *, each: int = 3) -> Pushes:
    """For each of `rows`: the `each` strongest helpers, then the `each` strongest harmers, by cosine.

    Ordered by the cosine and not by the dot product, or else the same few samples with the largest
    gradients of all would push everyone. A helper has a positive product, a harmer a negative one; there may
    be fewer than `each` of them.

    >>> import numpy as np
    >>> sketch = np.array([[1.0, 0.0], [2.0, 0.5], [-1.0, 0.0], [0.0, 3.0]])
    >>> found = pushes(np.array([10, 11, 12, 13]), sketch, np.array([0]), each=1)
    >>> found.index, found.other, found.dot
    (array([10, 10]), array([11, 12]), array([ 2., -1.]))
    """
    units, lengths = directions(sketch)
    samples, others, cosines = [], [], []
    for row in rows:
        cosine = units @ units[row]
        cosine[row] = 0.0
        helpers = [other for other in _lowest(-cosine, each) if cosine[other] > 0]
        harmers = [other for other in _lowest(cosine, each) if cosine[other] < 0]
        chosen = np.array(helpers + harmers, dtype=np.int64)
        samples.append(np.full(len(chosen), row))
        others.append(chosen)
        cosines.append(cosine[chosen])
    if not samples:
        none = np.empty(0, dtype=np.int64)
        return Pushes(none, none, np.empty(0), np.empty(0))
    a, b = np.concatenate(samples), np.concatenate(others)
    cosine = np.concatenate(cosines).astype(np.float64)
    return Pushes(index[a], index[b], cosine * lengths[a] * lengths[b], cosine)


def _lowest(values: Floats, count: int) -> Integers:  # (n,) -> (count,)
    """Where the lowest values are, the lowest first, and of equal ones the first first."""
    if count < len(values):
        limit = np.partition(values, count - 1)[count - 1] if count else -np.inf
        few = np.flatnonzero(values <= limit)
    else:
        few = np.arange(len(values))
    return few[np.argsort(values[few], kind="stable")][:count]
