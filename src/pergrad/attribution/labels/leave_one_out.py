"""Predicts each sample's label from all others, by ridge regression on its label-free gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats, Integers

__all__ = ["LeaveOneOut", "leave_one_out", "tried_rows"]

_DAMPINGS = np.logspace(-5, 3, 17)  # relative to the mean squared length of the features
_CONSTANT = 0.5  # the feature that stands for the intercept
_LARGEST_LEVERAGE = 1 - 1e-9
_TRIED = 20_000  # samples that a choice is tried on; more would not change it
_DAMPED = 4096  # samples that dampings, a factor of 3 apart, are tried on


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
    """Leave-one-out predictions of a ridge regression, computed for the rows that are read."""

    def __init__(self, features: Matrix, labels: Integers, classes: int) -> None:
        self._labels, self._classes = labels, classes
        with _one_thread():
            self._z, basis, squares = _rotation(_Prepared(features))
            inner = torch.zeros(self._z.shape[1], classes, dtype=torch.float64)
            for some in blocks(len(labels)):
                inner += torch.from_numpy(self._z[some]).T @ self._onehot(some)
            if basis is not None:
                inner = basis.T @ inner
            tried = tried_rows(len(labels), _DAMPED)
            damping, leverage = self._least_error(basis, squares, inner, tried)
            weights = 1 / (squares + damping)
            self._leverage = leverage[:, None]
            if len(tried) < len(labels):
                self._leverage = np.empty((len(labels), 1))
                for some in blocks(len(labels)):
                    rotated = self._rotated(some, basis)
                    self._leverage[some] = _leverages(rotated, weights[:, None]).numpy()
            solved = weights[:, None] * inner
            self._weights = solved if basis is None else basis @ solved  # (k, classes)

    def __getitem__(self, rows: Any) -> np.ndarray:  # (m, classes)
        """Returns the predictions for some rows, from all others."""
        with _one_thread():
            fitted = (torch.from_numpy(self._z[rows]) @ self._weights).numpy()
        leverage = self._leverage[rows]
        return np.asarray((fitted - leverage * self._onehot(rows).numpy()) / (1 - leverage))

    def _rotated(self, rows: Any, basis: torch.Tensor | None) -> torch.Tensor:
        z = torch.from_numpy(self._z[rows])
        return z if basis is None else z @ basis

    def _onehot(self, rows: Any) -> torch.Tensor:
        labels = torch.from_numpy(np.ascontiguousarray(self._labels[rows]))
        return torch.nn.functional.one_hot(labels, self._classes).double()

    def _least_error(
        self,
        basis: torch.Tensor | None,
        squares: torch.Tensor,
        inner: torch.Tensor,
        tried: Integers,
    ) -> tuple[float, Floats]:
        """Returns the damping with the least squared error over the rows, and the leverages with it."""
        dampings = torch.from_numpy(_DAMPINGS)
        weights = 1 / (squares[:, None] + dampings)  # (r, 17)
        solved = weights.T[:, :, None] * inner  # (17, r, classes)
        errors = torch.zeros(len(dampings), dtype=torch.float64)
        leverages = torch.empty(len(dampings), len(tried), dtype=torch.float64)
        for some in blocks(len(tried)):
            rotated, onehot = self._rotated(tried[some], basis), self._onehot(tried[some])
            leverages[:, some] = _leverages(rotated, weights).T
            for number in range(len(dampings)):
                # ŷ − y = (h − y) / (1 − H): the fit's own error, enlarged by the leverage.
                missed = (rotated @ solved[number]).sub_(onehot)
                shares = (1 - leverages[number, some]).reciprocal_().square_()
                errors[number] += missed.square_().sum(1) @ shares
        best = int(errors.argmin())
        return float(_DAMPINGS[best]), leverages[best].numpy()


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
        peaks = [float(np.abs(features[some]).max(initial=0.0)) for some in blocks(samples)]
        self._unit = max(peaks, default=0.0) or 1.0
        self._mean, self._length = np.zeros(width), 1.0
        total = np.zeros(width)
        for some in blocks(samples):
            total += self._scaled(some).sum(axis=0)
        self._mean = total / max(1, samples)
        squares = 0.0
        for some in blocks(samples):
            squares += float(np.square(self._scaled(some)).sum())
        self._length = float(np.sqrt(squares / max(1, samples))) or 1.0

    @property
    def shape(self) -> tuple[int, int]:
        samples, width = self._features.shape
        return samples, width + 1

    def __getitem__(self, rows: Any) -> np.ndarray:  # (m, k + 1)
        scaled = self._scaled(rows)
        return np.concatenate([scaled, np.full((len(scaled), 1), _CONSTANT)], axis=1)

    def _scaled(self, rows: Any) -> np.ndarray:
        found: np.ndarray = self._features[rows].astype(np.float64)
        found /= self._unit
        found -= self._mean
        found /= self._length
        return found


def _rotation(z: _Prepared) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
    """Returns Z, V and s² of Z = U diag(s) Vᵀ; or Z V, None and s² if Z has more columns than rows."""
    samples, width = z.shape
    if width <= samples:
        gram = torch.zeros(width, width, dtype=torch.float64)
        for some in blocks(samples):
            rows = torch.from_numpy(z[some])
            gram += rows.T @ rows
        squares, basis = torch.linalg.eigh(gram)
        return z, basis, squares.clamp(min=0)
    rows = torch.from_numpy(z[:])
    squares, basis = torch.linalg.eigh(rows @ rows.T)  # Z V = U diag(s)
    squares = squares.clamp(min=0)
    return (basis * squares.sqrt()).numpy(), None, squares


def _leverages(
    rotated: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:  # (n, r), (r, d) -> (n, d)
    return (rotated.square() @ weights).clamp_(max=_LARGEST_LEVERAGE)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread within the block: the rounding of LAPACK depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
