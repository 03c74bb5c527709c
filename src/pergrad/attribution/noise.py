"""Estimates the gradient noise scale of a data set and the batch size that it suggests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pergrad.attribution.matrices import Matrix, blocks
from pergrad.attribution.samples import Floats

__all__ = ["Noise", "gradient_noise"]

_BLOCKS = 20  # jackknife blocks: few enough to be cheap, enough to estimate a variance
_AT_ONCE = 200 * _BLOCKS  # samples in memory at a time: each of these blocks has its share of them


@dataclass(frozen=True)
class Noise:
    """Unbiased estimates of tr(Σ) and |G|², and their ratio, the simple noise scale.

    `scale` is None if it cannot be estimated: with fewer than two samples, or if noise outweighs the mean
    gradient so far that the estimate of |G|² is not positive. `low` and `high` are two standard errors away
    (from a jackknife over blocks of samples, and the error of the sketch): about 95% of such intervals
    contain the true value. `high` is None if there is no upper bound. `low` may be known when `scale` is not:
    the noise scale is then at least `low`.
    """

    trace: float  # tr(Σ), Σ the covariance of one sample's gradient
    squared_mean: float  # |G|², G the expected gradient; the estimate may be negative
    scale: float | None  # tr(Σ) / |G|²
    low: float | None
    high: float | None

    @property
    def critical_batch_size(self) -> int | None:
        """Returns the noise scale, rounded: beyond this batch size, larger batches save few steps."""
        return None if self.scale is None else max(1, round(self.scale))


def gradient_noise(norm: Floats, sketch: Matrix) -> Noise:  # (n,), (n, k)
    """tr(Σ) = (Σ_n |g_n|² - |Σ_n g_n|² / N) / (N - 1) and |G|² = |Σ_n g_n|² / N² - tr(Σ) / N.

    |g_n|² is exact. |Σ_n s_n|² estimates |Σ_n g_n|² without bias, with a relative error of about √(2 / k).
    All values must be finite.

    >>> import numpy as np
    >>> gradients = np.array([[3.0, 4.0], [1.0, 4.0]])
    >>> noise = gradient_noise(np.linalg.norm(gradients, axis=1), gradients)
    >>> (
    ...     round(noise.trace, 9),
    ...     round(noise.squared_mean, 9),
    ...     round(noise.scale, 3),
    ...     noise.critical_batch_size,
    ... )
    (2.0, 19.0, 0.105, 1)
    """
    samples, width = sketch.shape
    if samples < 2:
        return Noise(math.nan, math.nan, None, None, None)
    # Squares of norms of 1e200 or 1e-200 leave the range of float64.
    unit = float(norm.max()) or 1.0
    squares = np.square(norm.astype(np.float64) / unit)
    # Each block takes every _BLOCKS-th sample, so that neighbours in a sorted data set are spread out.
    parts = [slice(start, None, _BLOCKS) for start in range(min(_BLOCKS, samples))]
    sizes = np.array([len(squares[part]) for part in parts])
    square_sums = np.array([squares[part].sum() for part in parts])
    sums = np.zeros((len(parts), width))
    for some in blocks(samples, _AT_ONCE):
        rows = sketch[some]
        for number, part in enumerate(parts):
            sums[number] += rows[part].sum(axis=0, dtype=np.float64)
    sums /= unit
    trace, squared_mean = _estimates(samples, square_sums.sum(), sums.sum(axis=0))
    scale = max(0.0, trace / squared_mean) if squared_mean > 0 else None
    low, high = _interval(samples, sizes, square_sums, sums, width)
    return Noise(trace * unit * unit, squared_mean * unit * unit, scale, low, high)


def _estimates(samples: int, squares: float, total: Floats) -> tuple[float, float]:
    length = float(total @ total)
    trace = (float(squares) - length / samples) / (samples - 1)
    return trace, length / samples**2 - trace / samples


def _interval(
    samples: int, sizes: Floats, squares: Floats, sums: Floats, width: int
) -> tuple[float | None, float | None]:
    """Inverts two standard errors around |G|² / tr(Σ), which is close to normal; its inverse is not."""
    if samples - sizes.max() < 2:
        return None, None
    whole = _inverse(samples, squares.sum(), sums.sum(axis=0))
    inverses = np.empty(len(sizes))
    for block in range(len(sizes)):
        kept = np.arange(len(sizes)) != block
        inverses[block] = _inverse(
            int(sizes[kept].sum()), squares[kept].sum(), sums[kept].sum(axis=0)
        )
    if not (math.isfinite(whole) and np.isfinite(inverses).all()):
        return None, None  # no noise
    spread = inverses - inverses.mean()
    variance = (len(sizes) - 1) / len(sizes) * float(spread @ spread)
    # Error of the sketch: |Σ s_n|², and so this ratio plus 1 / N, has a relative error of √(2 / k).
    error = math.sqrt(variance + 2 / width * (whole + 1 / samples) ** 2)
    above, below = whole + 2 * error, whole - 2 * error
    return 1 / above if above > 0 else None, 1 / below if below > 0 else None


def _inverse(samples: int, squares: float, total: Floats) -> float:
    trace, squared_mean = _estimates(samples, squares, total)
    return squared_mean / trace if trace > 0 else math.nan
