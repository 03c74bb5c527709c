"""Computes all findings about a data set from the rows of one pass over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pergrad.attribution.alignment import alignment
from pergrad.attribution.directions import directions
from pergrad.attribution.duplicates import Duplicates, near_duplicates
from pergrad.attribution.evidence import evidence
from pergrad.attribution.groups import dominant_groups
from pergrad.attribution.influence import self_influence
from pergrad.attribution.noise import Noise, gradient_noise
from pergrad.attribution.pushes import Pushes, pushes
from pergrad.attribution.samples import Floats, Integers, Samples
from pergrad.attribution.suspicion import ranks, suspicion

__all__ = ["Findings", "analyse", "quantiles"]

_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Findings:
    """Findings of an audit: arrays with a row per sample, in order of `index`, and facts about the data set.

    A sample whose loss or gradient is not finite ranks first, with a suspicion of inf; its alignment and
    self-influence are NaN.
    """

    index: Integers  # (n,)
    alignment: Floats  # (n,) cosine with the mean gradient
    self_influence: Floats  # (n,)
    suspicion: Floats  # (n,) higher is more suspicious
    rank: Integers  # (n,) 1 for the most suspicious
    evidence: tuple[tuple[str, ...], ...]  # (n,) short sentences
    noise: Noise
    dominant_groups: Mapping[str, float]  # share of the squared norm, the largest first
    duplicates: Duplicates
    pushes: Pushes  # on the samples that rank highest
    quantiles: Mapping[str, Mapping[str, float]]  # of "norm" and "loss"

    @property
    def noise_scale(self) -> float | None:
        return self.noise.scale

    @property
    def critical_batch_size(self) -> int | None:
        return self.noise.critical_batch_size

    def top(self, count: int) -> Integers:
        """Returns the indices of the `count` most suspicious samples, the most suspicious first."""
        return self.index[np.argsort(self.rank)[:count]]

    def worth_showing(self, *, top: int = 50, pairs: int = 20) -> Integers:
        """Returns the sorted indices of the samples a report shows: top ranked, pushing, duplicates."""
        shown = [self.top(top), self.duplicates.index_a[:pairs], self.duplicates.index_b[:pairs]]
        return np.unique(np.concatenate([*shown, self.pushes.other]))


def analyse(
    samples: Samples,
    *,
    top: int = 50,
    damping: float = 0.1,
    duplicate_cosine: float = 0.99,
) -> Findings:
    """Computes all findings of a report from losses, norms and sketches; needs neither model nor data.

    Deterministic: equal arrays give equal findings.

    Args:
        samples: the rows of the pass over the data set.
        top: number of top-ranked samples for which to find the samples that push them.
        damping: damping of `self_influence`, relative to the mean curvature.
        duplicate_cosine: smallest cosine of two gradients that count as near-identical.

    >>> import numpy as np
    >>> gradients = np.array([[1.0, 0.0], [1.1, 0.0], [0.9, 0.1], [-5.0, 9.0]])
    >>> norm = np.linalg.norm(gradients, axis=1)
    >>> samples = Samples(np.arange(4), norm, norm, {"head": norm}, gradients)
    >>> analyse(samples).top(1)
    array([3])
    """
    usable = samples.usable
    rows = samples.sketch if usable.all() else samples.sketch[usable]
    pointing = directions(rows)
    aligned = _spread(alignment(pointing), usable)
    influence = _spread(self_influence(rows, damping=damping), usable)
    scores = suspicion(np.where(usable, samples.loss, np.nan), influence)
    rank = ranks(scores)
    # Rows among the usable samples: pushes compare sketches, which must be finite.
    best = np.argsort(rank[usable], kind="stable")[:top]
    return Findings(
        samples.index,
        aligned,
        influence,
        scores,
        rank,
        evidence(samples, aligned, influence),
        gradient_noise(samples.norm[usable], rows),
        dominant_groups(samples.group_norms),
        near_duplicates(
            samples.index[usable], samples.norm[usable], pointing, threshold=duplicate_cosine
        ),
        pushes(samples.index[usable], pointing, best),
        {"norm": quantiles(samples.norm), "loss": quantiles(samples.loss)},
    )


def quantiles(values: Floats) -> dict[str, float]:
    """Returns quantiles and mean of the finite values, if any, and the count of the others.

    >>> import numpy as np
    >>> quantiles(np.array([1.0, 3.0, np.nan]))["0.5"], quantiles(np.array([np.inf]))
    (2.0, {'not_finite': 1})
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    result: dict[str, float] = {"not_finite": len(values) - len(finite)}
    if len(finite) > 0:
        result["mean"] = float(finite.mean())
        found = np.quantile(finite, _QUANTILES)
        result |= {f"{q:g}": float(v) for q, v in zip(_QUANTILES, found, strict=True)}
    return result


def _spread(values: Floats, where: np.ndarray) -> Floats:
    """Scatters the values to the rows where `where` is true; the other rows are NaN."""
    result = np.full(len(where), np.nan)
    result[where] = values
    return result
