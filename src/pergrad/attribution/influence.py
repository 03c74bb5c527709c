"""Computes self-influence: how much a sample's own gradient changes the loss on that sample."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.directions import Directions, directions, largest_entries
from pergrad.attribution.matrices import Chosen, Matrix, blocks, held
from pergrad.attribution.samples import Floats
from pergrad.attribution.whitening import whitening

__all__ = ["outlying", "self_influence"]

_BLOCK = 64
_NARROW, _WIDE = 1e-6, 1e6  # largest entries whose squares float32 has with all digits
_FAR = 10.0  # multiple of the 99% quantile beyond which a sketch is shortened


def self_influence(sketch: Matrix, *, damping: float = 0.1) -> Floats:  # (n, k) -> (n,)
    """s_n^T (S^T S / N + λ I)^-1 s_n, with λ = damping · tr(S^T S / N) / k.

    The matrix is the second moment of the sketched gradients, an estimate of the curvature: a gradient in a
    direction that many samples share counts less than one that stands alone. The sum over the samples is at
    most N k; a sample that occurs r times has about 1/r of the influence of one that occurs once. λ bounds
    the inverse in directions that no sample uses.

    If the largest entry of a sketch is over 10 times the 99% quantile of these entries, the sketch is
    shortened to that bound in the matrix: one exploding sample would make all others look alike.

    Rows must be finite. Zero gradients have no influence.

    >>> import numpy as np
    >>> shared, alone = [2.0, 0.0], [0.0, 2.0]
    >>> self_influence(np.array([shared, shared, shared, alone]), damping=1e-9).round(2)
    array([1.33, 1.33, 1.33, 4.  ])
    """
    samples, width = sketch.shape
    if samples == 0:
        return np.zeros(0)
    largest = largest_entries(sketch)
    if largest.max() < np.finfo(sketch.dtype).tiny:  # zero or subnormal
        return np.zeros(samples)
    limit = _limit(largest)
    kept = np.ones(samples)
    np.divide(limit, largest, out=kept, where=largest > limit)
    # Squares of gradients of 1e200 or 1e-200 leave the range of float64; the result has no unit.
    unit = float((kept * largest).max())
    if _NARROW < unit < _WIDE and not (largest > limit).any():
        rows_of = (
            sketch.__getitem__
        )  # as they are: a scaled copy takes a fifth of the time of the products
    else:
        scales = (kept / unit).astype(sketch.dtype)[:, None]

        def rows_of(some: slice) -> Floats:
            return np.asarray(sketch[some] * scales[some])

    # The sketch's dtype is accurate enough for products over a block because of λ; the rest is float64.
    moment = np.zeros((width, width))
    for some in blocks(samples):
        rows = rows_of(some)
        moment += rows.T @ rows
    moment /= samples
    scale = float(np.trace(moment)) / width
    whitened = whitening(moment + damping * scale * np.eye(width)).astype(sketch.dtype)
    squares = np.zeros(samples)
    for some in blocks(samples):
        rows = rows_of(some)
        for start in range(0, width, _BLOCK):  # skips most zeros of the triangular matrix
            stop = min(start + _BLOCK, width)
            solved = rows[:, :stop] @ whitened[start:stop, :stop].T
            squares[some] += np.einsum("nk,nk->n", solved, solved)
    return squares / np.square(np.maximum(kept, 1e-150))  # 1e-150 squared is still above zero


def outlying(
    free: Matrix,
    pointing: Directions | None = None,
    influence: Floats | None = None,
    *,
    damping: float = 0.1,
) -> Floats:  # (n, k) -> (n,)
    """The larger of two self-influences of label-free gradients: of the gradients, and of their directions.

    From both the mean is subtracted. Long gradients hide what is unusual about the direction of a short one,
    as behind a layer that normalises its input; the directions alone know nothing of lengths. On the older
    cells of `benchmarks.ranking` the larger one has an average precision of .84, either alone .78 and .72.
    Where they are known already, `pointing` are the directions of the gradients, and `influence` is the
    self-influence of the centred gradients without any of them shortened.

    >>> import numpy as np
    >>> rows = np.array([[1.0, 0.1], [2.0, 0.0], [3.0, 0.1], [0.0, 0.1], [2.5, 0.0]])
    >>> int(outlying(rows).argmax())
    3
    """
    every = np.ones(len(free), dtype=bool)
    pointing = directions(free) if pointing is None else pointing
    centred = Chosen(free, every, centred=True)
    if influence is None or _has_far(centred):
        influence = self_influence(held(centred), damping=damping)
    of_directions = self_influence(held(Chosen(pointing, every, centred=True)), damping=damping)
    return np.maximum(influence, of_directions)


def _limit(largest: Floats) -> float:
    """Returns the largest entry beyond which a sketch is shortened."""
    return _FAR * float(np.quantile(largest, 0.99)) or float(largest.max())


def _has_far(sketch: Matrix) -> bool:
    largest = largest_entries(sketch)
    return len(largest) > 0 and float(largest.max()) > _limit(largest)
