"""Judges each label by what all other samples would have called that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.directions import shortened
from pergrad.attribution.labels.leave_one_out import LeaveOneOut, tried_rows
from pergrad.attribution.matrices import Chosen, Matrix, blocks, held
from pergrad.attribution.samples import Floats, Integers

__all__ = ["LabelErrors", "label_errors"]

_LEAST_SKILL = 0.05  # share of the error of guessing that the predictions must save to count errors
# Doubts above which a label counts as wrong. The first was chosen on the older cells of `benchmarks.ranking`;
# in nine of ten cells the number of wrong labels lies between the counts of the other two.
_EXPECTED, _LOW, _HIGH = 0.2, 0.4, 0.0
_SHARPEST = np.geomspace(1.0, 40.0, 25)  # factors of the predictions before a softmax


@dataclass(frozen=True)
class LabelErrors:
    """How far the other samples disagree with each label; arrays with a row per sample.

    `doubt` orders the samples: the prediction for the best other class minus that for the own. A sample whose
    class has no other member cannot be judged; neither can one whose gradient is not finite. Both have the
    least doubt, no suggestion (-1), and NaN for probabilities.

    `expected` is the number of wrong labels to expect: the labels with a doubt above 0.2. `low` counts those
    above 0.4, and `high` all whose suggested class is another one, which includes samples between two
    classes. All are None if the gradients do not tell the classes apart.
    """

    doubt: Floats  # (n,)
    own: Floats  # (n,) probability of the label given
    suggested: Integers  # (n,) the class with the highest probability
    confidence: Floats  # (n,) its probability
    doubted: NDArray[np.bool_]  # (n,) the suggested class is another one
    expected: int | None
    low: int | None
    high: int | None
    skill: (
        float  # 1 − squared error of the predictions / squared error of the shares of the classes
    )
    # (n,) self-influence of the features at the last checkpoint, a result of the regression; else NaN
    influence: Floats | None = None


def label_errors(
    features: Sequence[Matrix],
    labels: Integers,
    usable: NDArray[np.bool_] | None = None,
    *,
    damping: float = 0.1,
) -> LabelErrors | None:
    """Judges labels by ridge regression on label-free gradients, leave-one-out, averaged over checkpoints.

    Label-free gradients, of logits · v for one fixed random v, say how a sample moves the model, but not
    which label it has: so they still tell the classes apart when the model has learnt its labels by heart.
    Those of broken inputs, far longer than usual, are shortened: see `shortened`.

    Args:
        features: for each checkpoint, (n, k) label-free gradients or their sketches.
        labels: (n,) classes from 0; a negative class is unknown.
        usable: mask of the samples to judge, and to judge by; default: all.
        damping: damping of `influence`, as of `self_influence`.

    Returns:
        None if there are fewer than two classes with two samples each: nothing to compare.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> truth = np.arange(100) % 2
    >>> features = truth[:, None] * 4.0 + generator.normal(size=(100, 3))
    >>> given = truth.copy()
    >>> given[:2] = 1 - given[:2]
    >>> found = label_errors([features], given)
    >>> found.doubt.argsort()[-2:], found.suggested[:2], found.expected
    (array([0, 1]), array([0, 1]), 2)
    """
    judged = labels >= 0 if usable is None else usable & (labels >= 0)
    sizes = np.bincount(labels[judged], minlength=int(labels.max(initial=-1)) + 1)
    present = np.flatnonzero(sizes >= 2)
    if len(present) < 2:
        return None
    judged &= np.isin(labels, present)
    classes = np.searchsorted(present, labels[judged])
    rows = [shortened(Chosen(part, judged)) for part in features]
    parts = [LeaveOneOut(part, classes, len(present), damping=damping) for part, _ in rows]
    found = _judged(held(_Mean(parts)), classes, present, judged)
    factors = np.maximum(rows[-1][1], 1e-150)  # squared still above zero
    influence = parts[-1].influence / np.square(factors)
    return replace(found, influence=_spread(influence, judged, np.nan))


class _Mean:
    """The mean of the predictions at all checkpoints, for the rows that are read."""

    def __init__(self, parts: Sequence[LeaveOneOut]) -> None:
        self._parts = parts
        self.shape = parts[0].shape
        self.dtype = np.dtype(np.float64)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Floats:  # (m, classes)
        return np.asarray(np.mean([part[rows] for part in self._parts], axis=0))


def _judged(
    found: Matrix, classes: Integers, present: Integers, judged: NDArray[np.bool_]
) -> LabelErrors:
    samples = len(classes)
    sharpness = _sharpness(found, classes)
    doubt, own, confidence = np.empty(samples), np.empty(samples), np.empty(samples)
    best, error = np.empty(samples, dtype=np.int64), 0.0
    for some in blocks(samples):
        predicted, given = _by_class(found[some]), classes[some]
        rows = np.arange(len(given))
        best[some] = predicted.argmax(axis=0)
        mine = predicted[given, rows]
        highest = predicted[best[some], rows]
        weight = 1 / np.exp(sharpness * (predicted - highest)).sum(axis=0)
        own[some], confidence[some] = np.exp(sharpness * (mine - highest)) * weight, weight
        error += float(np.square(predicted).sum() + (1 - 2 * mine).sum())
        predicted[given, rows] = -np.inf
        doubt[some] = predicted.max(axis=0) - mine
    doubted = best != classes
    skill = _skill(error, classes, len(present))
    expected = low = high = None
    if skill >= _LEAST_SKILL:
        expected, low, high = (int((doubt > least).sum()) for least in (_EXPECTED, _LOW, _HIGH))
    return LabelErrors(
        _spread(doubt, judged, float(doubt.min())),
        _spread(own, judged, np.nan),
        _spread(present[best], judged, -1).astype(np.int64),
        _spread(confidence, judged, np.nan),
        _spread(doubted, judged, 0).astype(bool),
        expected,
        low,
        high,
        skill,
    )


def _sharpness(found: Matrix, classes: Integers) -> float:
    """Returns the β of softmax(β ŷ) with the least squared error: ridge regressions are too timid."""
    errors = np.zeros(len(_SHARPEST))
    tried = tried_rows(len(classes))
    for some in blocks(len(tried)):
        below = _by_class(found[tried[some]])
        below -= below.max(axis=0)
        given, rows = classes[tried[some]], np.arange(below.shape[1])
        for number, sharpness in enumerate(_SHARPEST.tolist()):
            share = np.exp(sharpness * below)
            share /= share.sum(axis=0)
            # |p − y|² of a one-hot y
            errors[number] += float(
                np.einsum("cn,cn->", share, share) - 2 * share[given, rows].sum()
            )
    return float(_SHARPEST[errors.argmin()])


def _by_class(predicted: Floats) -> Floats:  # (n, classes) -> (classes, n)
    """Copies predictions so that sums over the classes add long rows, which is several times as fast."""
    return np.array(predicted.T, order="C")


def _skill(error: float, classes: Integers, count: int) -> float:
    """Compares a squared error with that of predicting the shares of the classes among the others."""
    sizes = np.bincount(classes, minlength=count).astype(np.float64)
    others = max(1, len(classes) - 1)
    shares = sizes / others
    # Of a sample of class c, the guess for c is (size - 1) / others, for another class its share.
    own = np.square((sizes - 1) / others - 1)
    base = float((sizes * (own + np.square(shares).sum() - np.square(shares))).sum())
    return 1 - error / base if base > 0 else 0.0


def _spread(values: np.ndarray, where: NDArray[np.bool_], other: float) -> np.ndarray:
    """Scatters the values to the rows where `where` is true."""
    result = np.full(len(where), other, dtype=np.float64)
    result[where] = values
    return result
