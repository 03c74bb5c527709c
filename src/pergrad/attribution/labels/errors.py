"""Judges each label by what all other samples would have called that sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.labels.leave_one_out import leave_one_out
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


def label_errors(
    features: Sequence[Floats], labels: Integers, usable: NDArray[np.bool_] | None = None
) -> LabelErrors | None:
    """Judges labels by ridge regression on label-free gradients, leave-one-out, averaged over checkpoints.

    Label-free gradients, of logits · v for one fixed random v, say how a sample moves the model, but not
    which label it has: so they still tell the classes apart when the model has learnt its labels by heart.

    Args:
        features: for each checkpoint, (n, k) label-free gradients or their sketches.
        labels: (n,) classes from 0; a negative class is unknown.
        usable: mask of the samples to judge, and to judge by; default: all.

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
    found = np.mean(
        [leave_one_out(part[judged], classes, len(present)) for part in features], axis=0
    )
    return _judged(found, classes, present, judged)


def _judged(
    found: Floats, classes: Integers, present: Integers, judged: NDArray[np.bool_]
) -> LabelErrors:
    rows = np.arange(len(classes))
    others = found.copy()
    others[rows, classes] = -np.inf
    doubt = others.max(axis=1) - found[rows, classes]
    share = _probabilities(found, classes)
    own, best = share[rows, classes], share.argmax(axis=1)
    confidence = share[rows, best]
    doubted = best != classes
    skill = _skill(found, classes)
    expected = low = high = None
    if skill >= _LEAST_SKILL:
        expected, low, high = (int((doubt > least).sum()) for least in (_EXPECTED, _LOW, _HIGH))
    return LabelErrors(
        _spread(doubt, judged, float(doubt.min())),
        _spread(own, judged, np.nan),
        _spread(present[best], judged, -1).astype(np.int64),
        _spread(confidence, judged, np.nan),
        _spread(doubted, judged, 0).astype(bool),
        *(expected, low, high, skill),
    )


def _probabilities(found: Floats, classes: Integers) -> Floats:  # (n, c), (n,) -> (n, c)
    """softmax(β ŷ), with the β of least squared error: predictions of a ridge regression are too timid."""
    onehot = np.eye(found.shape[1])[classes]
    best: tuple[float, Floats] | None = None
    for sharpness in _SHARPEST.tolist():
        share = np.exp(sharpness * (found - found.max(axis=1, keepdims=True)))
        share /= share.sum(axis=1, keepdims=True)
        error = float(np.square(share - onehot).sum())
        if best is None or error < best[0]:
            best = error, share
    assert best is not None
    return best[1]


def _skill(found: Floats, classes: Integers) -> float:
    """Compares the squared error with that of predicting the shares of the classes among the others."""
    n, sizes = len(classes), np.bincount(classes, minlength=found.shape[1])
    onehot = np.eye(found.shape[1])[classes]
    guessed = (sizes - onehot) / max(1, n - 1)
    base = float(np.square(guessed - onehot).sum())
    return 1 - float(np.square(found - onehot).sum()) / base if base > 0 else 0.0


def _spread(values: np.ndarray, where: NDArray[np.bool_], other: float) -> np.ndarray:
    """Scatters the values to the rows where `where` is true."""
    result = np.full(len(where), other, dtype=np.float64)
    result[where] = values
    return result
