"""Predicts each sample's label from all others, by ridge regression on its label-free gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pergrad.attribution.directions import peaks
from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats, Integers

__all__ = ["LeaveOneOut", "leave_one_out", "tried_rows"]

_DAMPINGS = np.logspace(-5, 3, 17)  # relative to the mean squared length of the features
_CONSTANT = 0.5  # the feature that stands for the intercept
_LARGEST_LEVERAGE = 1 - 1e-9
_NEAR_ONE = 0.9  # leverages above it are computed in float64: 1 / (1 − H) enlarges their rounding
# Multiples of the rounding of ZᵀZ, epsilon times its largest eigenvalue or the square of the longest row: a
# smaller damping needs it in float64. On 30 cells of `benchmarks.ranking` predictions with ZᵀZ in float32
# differ by at most 3e-5 at 500, 4e-4 at 40; one row that is far longer than all others hides them sooner.
_ABOVE_ROUNDING, _ABOVE_ROUNDING_OF_ONE = 500, 10_000
_TRIED = 20_000  # samples that a choice is tried on; more would not change it
_DAMPED = 4096  # samples that dampings, a factor of 3 apart, are tried on
_WIDE = 256  # columns of one product, of one or more dampings


def leave_one_out(features: Matrix, labels: Integers, classes: int) -> Floats:
    """ŷ_n = (h_n − H_nn y_n) / (1 − H_nn) with H = Z (ZᵀZ + λI)⁻¹ Zᵀ: what the others say of sample n.

    Ridge regression of the one-hot labels on the features has this closed form of its leave-one-out
    predictions: no model is fitted again. λ is the one of 17 whose leave-one-out predictions have the least
    squared error, over at most 4,096 samples. The features are centred and scaled as a whole. Each row sums
    to about 1, but single entries may lie below 0 or above 1.

    The result does not depend on the number of threads.

    Args:
        features: (n, k), finite.
        labels: (n,) classes from 0.
        classes: number of classes.

    >>> import numpy as np
    >>> features = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    >>> leave_one_out(features, np.array([0, 0, 1, 1, 1, 1]), 2).argmax(axis=1)
    array([0, 0, 0, 1, 1, 1])
    """
    found = LeaveOneOut(features, labels, classes)
    return np.concatenate([found[some] for some in blocks(len(labels))])


class LeaveOneOut:
    """Leave-one-out predictions of a ridge regression, computed for the rows that are read.

    ZᵀZ and the rotated rows are computed in the dtype of the features; rows with a leverage near one in
    float64, and ZᵀZ too if the best damping is small beside its rounding.
    `influence` is the self-influence of the centred features with that damping, (n,): N times a leverage.
    """

    def __init__(
        self, features: Matrix, labels: Integers, classes: int, *, damping: float = 0.1
    ) -> None:
        self._labels, self._classes = labels, classes
        with threadpool_limits(limits=1, user_api="blas"):  # more threads round otherwise
            self._prepared, self._dtype = _Prepared(features), features.dtype
            tried = tried_rows(len(labels), _DAMPED)
            samples, width = features.shape
            of_influence = damping * samples / width
            dampings = np.append(_DAMPINGS, of_influence)
            for dtype in dict.fromkeys([self._dtype, np.dtype(np.float64)]):
                self._z, self._basis, squares, inner = self._decomposed(dtype)
                best, some_leverages = self._least_error(squares, inner, dampings, tried)
                limit = _ABOVE_ROUNDING * squares.max(initial=0.0)
                limit = max(limit, _ABOVE_ROUNDING_OF_ONE * self._prepared.longest)
                if dampings[best] >= np.finfo(dtype).eps * limit:
                    break
            weights = 1 / (squares[:, None] + [dampings[best], of_influence])
            leverages = np.empty((samples, 2))
            leverages[tried] = some_leverages[:, [best, -1]]
            others = np.delete(np.arange(samples), tried)
            for some in blocks(len(others)):
                for own, _, found in self._leverages(others[some], weights):
                    leverages[others[some][own]] = found
            self._leverage = leverages[:, :1]
            # The constant is orthogonal to the centred features: its share is the same for all.
            share = _CONSTANT**2 / (samples * _CONSTANT**2 + of_influence)
            self.influence: Floats = samples * np.maximum(0.0, leverages[:, 1] - share)
            solved = weights[:, :1] * inner
            self._weights = solved if self._basis is None else self._basis @ solved  # (k, classes)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._labels), self._classes

    def __getitem__(self, rows: Any) -> Floats:  # (m, classes)
        """Returns the predictions for some rows, from all others."""
        with threadpool_limits(limits=1, user_api="blas"):  # more threads round otherwise
            if self._basis is None:
                fitted = self._z[rows] @ self._weights
            else:
                fitted = self._prepared.times(self._weights, rows)
        leverage = self._leverage[rows]
        return np.asarray((fitted - leverage * self._onehot(rows)) / (1 - leverage))

    def _onehot(self, rows: Any) -> Floats:
        labels = self._labels[rows]
        found = np.zeros((len(labels), self._classes))
        found[np.arange(len(labels)), labels] = 1.0
        return found

    def _decomposed(self, dtype: np.dtype[Any]) -> tuple[Any, Floats | None, Floats, Floats]:
        """Returns Z, V, s² and VᵀZᵀY of Z = U diag(s) Vᵀ; or Z V and no V if Z has more columns than rows."""
        z = self._prepared
        samples, width = z.shape
        if width > samples:
            rows = z[:]
            squares, basis = np.linalg.eigh(rows @ rows.T)  # Z V = U diag(s)
            squares = np.maximum(squares, 0.0)
            rotated = basis * np.sqrt(squares)
            return rotated, None, squares, rotated.T @ self._onehot(slice(None))
        gram, inner = np.zeros((width, width)), np.zeros((width, self._classes))
        for some in blocks(samples):
            rows = z.rows(some, dtype)
            gram += rows.T @ rows
            inner += rows.T @ self._onehot(some).astype(dtype)
        squares, basis = np.linalg.eigh(gram)
        return z, basis, np.maximum(squares, 0.0), basis.T @ inner

    def _leverages(
        self, rows: Integers, weights: Floats
    ) -> Iterator[tuple[NDArray[np.bool_], Floats, Floats]]:
        """Yields masks of parts of the rows, rotated features (m, r), and H (m, d) for weights (r, d)."""
        every = np.ones(len(rows), dtype=bool)
        if self._basis is None or self._dtype == np.float64:
            yield every, *self._exact_leverages(rows, weights)
            return
        rotated = self._prepared.rows(rows, self._dtype) @ self._basis.astype(self._dtype)
        found = (np.square(rotated) @ weights.astype(self._dtype)).astype(np.float64)
        near = found.max(axis=1) > _NEAR_ONE
        if near.any():
            yield near, *self._exact_leverages(rows[near], weights)
            yield ~near, rotated[~near], found[~near]
        else:
            yield every, rotated, found

    def _exact_leverages(self, rows: Integers, weights: Floats) -> tuple[Floats, Floats]:
        z = self._z[rows]
        rotated = z if self._basis is None else z @ self._basis
        return rotated, np.minimum(np.square(rotated) @ weights, _LARGEST_LEVERAGE)

    def _least_error(
        self, squares: Floats, inner: Floats, dampings: Floats, tried: Integers
    ) -> tuple[int, Floats]:
        """Returns which of the 17 dampings has the least squared error over the rows, and all leverages."""
        weights = 1 / (squares[:, None] + dampings)  # (r, d)
        errors = np.zeros(len(_DAMPINGS))
        leverages = np.empty((len(tried), len(dampings)))
        for some in blocks(len(tried)):
            for own, rotated, found in self._leverages(tried[some], weights):
                leverages[some][own] = found
                onehot = self._onehot(tried[some][own])
                for part in blocks(len(_DAMPINGS), max(1, _WIDE // self._classes)):
                    solved = weights[:, part, None] * inner[:, None]  # (r, d, classes)
                    fitted = rotated @ solved.reshape(len(inner), -1).astype(rotated.dtype)
                    # ŷ − y = (h − y) / (1 − H): the fit's own error, enlarged by the leverage.
                    missed = fitted.reshape(len(rotated), -1, self._classes) - onehot[:, None]
                    missed /= 1 - found[:, part, None]
                    errors[part] += np.einsum("ndc,ndc->d", missed, missed)
        return int(errors.argmin()), leverages


def tried_rows(samples: int, most: int = _TRIED) -> Integers:
    """Returns the rows that a choice is tried on: all, or so many random ones, in increasing order."""
    if samples <= most:
        return np.arange(samples)
    return np.sort(np.random.default_rng(0).choice(samples, most, replace=False))


class _Prepared:
    """Features in float64, centred and scaled to a mean squared length of 1, with a constant at the end."""

    def __init__(self, features: Matrix) -> None:
        self._features = features
        samples, width = features.shape
        # Squares of gradients of 1e200 or 1e-200 leave the range of float64.
        self._unit = (
            max((float(peaks(features[some]).max()) for some in blocks(samples)), default=0.0)
            or 1.0
        )
        total, squares, longest = np.zeros(width), 0.0, 0.0
        for some in blocks(samples):
            total += (features[some] / self._unit).sum(axis=0, dtype=np.float64)
        self._mean = total / max(1, samples)
        mean = self._mean.astype(features.dtype)
        for some in blocks(samples):
            rows = features[some] / self._unit - mean
            each = np.einsum("nk,nk->n", rows, rows)
            squares += float(each.sum(dtype=np.float64))
            longest = max(longest, float(each.max()))
        self._length = float(np.sqrt(squares / max(1, samples))) or 1.0
        self.longest = longest / self._length**2  # the largest squared length of a row

    @property
    def shape(self) -> tuple[int, int]:
        samples, width = self._features.shape
        return samples, width + 1

    def __getitem__(self, rows: Any) -> Floats:  # (m, k + 1)
        return self.rows(rows, np.dtype(np.float64))

    def rows(self, rows: Any, dtype: np.dtype[Any]) -> Floats:  # (m, k + 1)
        features = self._features[rows]
        found = np.full((len(features), self.shape[1]), _CONSTANT, dtype)
        scaled = np.divide(features, self._unit, out=found[:, :-1])
        scaled -= self._mean.astype(dtype)
        scaled /= self._length
        return found

    def times(self, weights: Floats, rows: Any) -> Floats:  # (k + 1, c) -> (m, c)
        """Z W in float64, without writing the centred features.

        The features are divided in their own dtype, as for Z: a leverage near one enlarges the rounding.
        """
        own = weights[:-1] / self._length
        shift = _CONSTANT * weights[-1] - self._mean @ own
        scaled = self._features[rows] / self._unit
        return np.asarray(scaled.astype(np.float64) @ own + shift)
