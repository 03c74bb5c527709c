"""Gradients for the tests of findings: rows whose sketch is the gradient itself."""

import numpy as np

from pergrad.attribution import Samples


def gradients(samples: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(samples, width))


def samples_of(rows: np.ndarray, loss: np.ndarray | None = None) -> Samples:
    """Two groups, the first half of the columns and the second; the loss is the norm unless given."""
    half = rows.shape[1] // 2
    norm = np.linalg.norm(rows, axis=1)
    groups = {
        "body": np.linalg.norm(rows[:, :half], axis=1),
        "head": np.linalg.norm(rows[:, half:], axis=1),
    }
    return Samples(np.arange(len(rows)), norm if loss is None else loss, norm, groups, rows)
