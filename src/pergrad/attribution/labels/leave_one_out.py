"""Predicts each sample's label from all others, by ridge regression on its label-free gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pergrad.attribution.samples import Floats, Integers

__all__ = ["leave_one_out"]

_DAMPINGS = np.logspace(-5, 3, 17)  # relative to the mean squared length of the features
_CONSTANT = 0.5  # the feature that stands for the intercept
_LARGEST_LEVERAGE = 1 - 1e-9


def leave_one_out(features: Floats, labels: Integers, classes: int) -> Floats:
    """ŷ_n = (h_n − H_nn y_n) / (1 − H_nn) with H = Z (ZᵀZ + λI)⁻¹ Zᵀ: what the others say of sample n.

    Ridge regression of the one-hot labels on the features has this closed form of its leave-one-out
    predictions: no model is fitted again. λ is the one of 17 whose leave-one-out predictions have the least
    squared error. The features are centred and scaled as a whole. Each row sums to about 1, but single
    entries may lie below 0 or above 1.

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
    z = _prepared(features)
    onehot = np.zeros((len(z), classes))
    onehot[np.arange(len(z)), labels] = 1.0
    with _one_thread():
        rotated, squares = _rotated(torch.from_numpy(z))
        inner = rotated.T @ torch.from_numpy(onehot)  # (r, classes)
        lengths = rotated.square()
        best: tuple[float, np.ndarray] | None = None
        for damping in _DAMPINGS.tolist():
            weights = 1 / (squares + damping)
            leverage = (lengths @ weights).clamp(max=_LARGEST_LEVERAGE).numpy()[:, None]
            fitted = (rotated @ (weights[:, None] * inner)).numpy()
            found = (fitted - leverage * onehot) / (1 - leverage)
            error = float(np.square(found - onehot).mean())
            if best is None or error < best[0]:
                best = error, found
    assert best is not None
    return best[1]


def _prepared(features: Floats) -> np.ndarray:  # (n, k) -> (n, k + 1) float64
    """Centres the features, scales them to a mean squared length of 1, and adds a constant."""
    rows = features.astype(np.float64)
    # Squares of gradients of 1e200 or 1e-200 leave the range of float64.
    rows /= float(np.abs(rows).max(initial=0.0)) or 1.0
    rows -= rows.mean(axis=0)
    rows /= float(np.sqrt(np.square(rows).sum(axis=1).mean())) or 1.0
    return np.concatenate([rows, np.full((len(rows), 1), _CONSTANT)], axis=1)


def _rotated(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (Z V, s²) of Z = U diag(s) Vᵀ: the features in the basis of their principal directions."""
    n, k = z.shape
    if k <= n:
        squares, basis = torch.linalg.eigh(z.T @ z)
        return z @ basis, squares.clamp(min=0)
    squares, basis = torch.linalg.eigh(z @ z.T)  # Z V = U diag(s)
    squares = squares.clamp(min=0)
    return basis * squares.sqrt(), squares


@contextmanager
def _one_thread() -> Iterator[None]:
    """Runs torch on one thread within the block: the rounding of LAPACK depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
