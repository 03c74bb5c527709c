"""The gradient noise scale of a data set, and the batch size that it suggests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["Noise", "gradient_noise"]

_BLOCKS = 20  # of the jackknife: few enough to be cheap, enough for a spread


@dataclass(frozen=True)
class Noise:
    """tr(Σ) and |G|², each estimated without bias, and their ratio, the simple noise scale.

    `scale` is None where it cannot be told: with fewer than two samples, or where the noise outweighs the
    mean gradient so far that the estimate of |G|² is not above zero. `low` and `high` are two standard errors
    away (a jackknife over blocks of samples, and the error of the sketch): about 95% of such intervals hold
    the true value. `high` is None where there is no bound; `low` may be there though `scale` is not: the
    noise scale is at least that.
    """

    trace: float  # tr(Σ), Σ the covariance of one sample's gradient
    squared_mean: float  # |G|², G the expected gradient; may come out below zero
    scale: float | None  # tr(Σ) / |G|²
    low: float | None
    high: float | None

    @property
    def critical_batch_size(self) -> int | None:
        """The batch size up to which a larger batch nearly saves as many steps: the noise scale, rounded."""
        return None if self.scale is None else max(1, round(self.scale))


def gradient_noise(norm: Floats, sketch: Floats) -> Noise:  # (n,), (n, k)
    """tr(Σ) = (Σ_n |g_n|² - |Σ_n g_n|² / N) / (N - 1) and |G|² = |Σ_n g_n|² / N² - tr(Σ) / N.

    |g_n|² are exact, |Σ_n g_n|² is estimated by |Σ_n s_n|², without bias, to a relative error of about
    √(2 / k). All values must be finite.

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
    # Squares of norms of 1e200 or 1e-200 would leave float64.
    unit = float(norm.max()) or 1.0
    squares = np.square(norm.astype(np.float64) / unit)
    # Blocks of every _BLOCKS-th sample: neighbours in a sorted data set do not land in one block.
    blocks = [slice(start, None, _BLOCKS) for start in range(min(_BLOCKS, samples))]
    sizes = np.array([len(squares[block]) for block in blocks])
    square_sums = np.array([squares[block].sum() for block in blocks])
    sums = np.stack([sketch[block].sum(axis=0, dtype=np.float64) for block in blocks]) / unit
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
    """Two standard errors of the inverse, |G|² / tr(Σ): it is close to normal, the ratio itself is not."""
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
        return None, None  # no noise at all
    spread = inverses - inverses.mean()
    variance = (len(sizes) - 1) / len(sizes) * float(spread @ spread)
    # What the sketch adds: |Σ s_n|², and so this plus 1 / N, is off by √(2 / k) of itself.
    error = math.sqrt(variance + 2 / width * (whole + 1 / samples) ** 2)
    above, below = whole + 2 * error, whole - 2 * error
    return 1 / above if above > 0 else None, 1 / below if below > 0 else None


def _inverse(samples: int, squares: float, total: Floats) -> float:
    trace, squared_mean = _estimates(samples, squares, total)
    return squared_mean / trace if trace > 0 else math.nan
