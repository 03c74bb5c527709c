"""Computes all findings about a data set from the rows of one pass over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from pergrad.attribution.alignment import alignment
from pergrad.attribution.directions import Directions, directions, shortened
from pergrad.attribution.duplicates import EXACT_UP_TO, Duplicates, near_duplicates
from pergrad.attribution.evidence import evidence
from pergrad.attribution.groups import dominant_groups
from pergrad.attribution.influence import outlying, self_influence
from pergrad.attribution.labels import LabelErrors, Memorised, label_errors, memorised
from pergrad.attribution.matrices import Chosen, is_small
from pergrad.attribution.noise import Noise, gradient_noise
from pergrad.attribution.pushes import Pushes, pushes
from pergrad.attribution.samples import Floats, Integers, Samples
from pergrad.attribution.suspicion import ranks, suspicion

__all__ = ["Findings", "analyse", "quantiles"]

A = TypeVar("A")
B = TypeVar("B")

# Cosines of near-duplicates, and the largest share of their distance in that to the fifth-nearest sample.
# Chosen on the older cells of `benchmarks.ranking` (97% of the copies with 1% of noise are found, and hardly
# any other) and on data of two to four columns, where fewer are found.
_ALIKE, _APART = 0.96, 0.3
_ALIKE_OF_MANY, _ALIKE_BY_LOSS = 0.985, 0.99
_ROUNDING = 1e-5  # of float32, relative to the longest gradient
_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Findings:
    """Findings of an audit: arrays with a row per sample, in order of `index`, and facts about the data set.

    Samples rank by the doubt about their labels where label-free gradients and labels are known, else by
    suspicion, which is based on the loss. A sample whose loss or gradient is not finite ranks first, with a
    suspicion of inf; its alignment and self-influence are NaN.
    """

    index: Integers  # (n,)
    alignment: Floats  # (n,) cosine with the mean gradient
    self_influence: Floats  # (n,)
    suspicion: Floats  # (n,) higher is more suspicious
    labels: LabelErrors | None  # None if there are no labels, or no label-free gradients
    outlier: (
        Floats | None
    )  # (n,) label-free self-influence; None if there are no label-free gradients
    memorised: Memorised | None
    rank: Integers  # (n,) 1 for the sample to look at first
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

    def outliers(self, count: int) -> Integers:
        """Returns the indices of the `count` samples whose inputs are the least like the others'."""
        if self.outlier is None:
            return np.empty(0, dtype=np.int64)
        known = np.where(np.isfinite(self.outlier), self.outlier, -np.inf)
        return self.index[np.argsort(-known, kind="stable")[:count]]

    def in_groups(self, groups: int, members: int = 8) -> Integers:
        """Returns the indices of the first members of the largest groups of duplicates."""
        group = self.duplicates.group
        found = [self.index[group == number][:members] for number in range(1, groups + 1)]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])

    def worth_showing(self, *, top: int = 50, groups: int = 20, outliers: int = 24) -> Integers:
        """Returns the sorted indices of the samples a report shows: ranked, pushing, outliers, duplicates."""
        shown = [self.top(top), self.outliers(outliers), self.in_groups(groups)]
        return np.unique(np.concatenate([*shown, self.pushes.other]))


# Kernels of BLAS for one thread and for several round differently on some processors.
@threadpool_limits.wrap(limits=1, user_api="blas")
def analyse(
    samples: Samples,
    *,
    top: int = 50,
    damping: float = 0.1,
    duplicate_cosine: float | None = None,
    names: Mapping[int, str] | None = None,
) -> Findings:
    """Computes all findings of a report from losses, norms and sketches; needs neither model nor data.

    Deterministic: equal arrays give equal findings, on any number of threads.

    Args:
        samples: the rows of the pass over the data set.
        top: number of top-ranked samples for which to find the samples that push them.
        damping: damping of `self_influence`, relative to the mean curvature.
        duplicate_cosine: smallest cosine of two gradients that count as near-identical. By default 0.96 of
            label-free gradients after their mean is subtracted, 0.985 of more than 20,000, and 0.99 of
            gradients of the loss; of at most 20,000 the two must also be much closer than other samples are.
        names: names of the classes, for the evidence.

    >>> import numpy as np
    >>> gradients = np.array([[1.0, 0.0], [1.1, 0.0], [0.9, 0.1], [-5.0, 9.0]])
    >>> norm = np.linalg.norm(gradients, axis=1)
    >>> samples = Samples(np.arange(4), norm, norm, {"head": norm}, gradients)
    >>> analyse(samples).top(1)
    array([3])
    """
    usable = samples.usable
    rows = Chosen(samples.sketch, usable)
    pointing = directions(rows)
    aligned = _spread(alignment(pointing), usable)
    influence = _spread(self_influence(rows, damping=damping), usable)
    scores = suspicion(np.where(usable, samples.loss, np.nan), influence)
    free = _directions_of_free(samples)
    is_held = samples.free is not None and is_small(samples.free)
    (labels, outlier, of_model), duplicates = _side_by_side(
        lambda: _label_free(samples, free, damping),
        lambda: _duplicates(samples, pointing, free, duplicate_cosine),
        threads=torch.get_num_threads() if is_held else 1,
    )
    rank = ranks(scores if labels is None else np.where(usable, labels.doubt, np.inf))
    # Rows among the usable samples: pushes compare sketches, which must be finite.
    best = np.argsort(rank[usable], kind="stable")[:top]
    return Findings(
        samples.index,
        aligned,
        influence,
        scores,
        labels,
        outlier,
        of_model,
        rank,
        evidence(samples, aligned, influence, labels, outlier, names),
        gradient_noise(samples.norm[usable], rows),
        dominant_groups(samples.group_norms),
        duplicates,
        pushes(samples.index[usable], pointing, best),
        {"norm": quantiles(samples.norm), "loss": quantiles(samples.loss)},
    )


def _side_by_side(one: Callable[[], A], other: Callable[[], B], *, threads: int) -> tuple[A, B]:
    """Returns the results of both, which run at the same time if there are two threads.

    A product of matrices rounds differently on several threads. This keeps each on one, and both busy.
    """
    if threads < 2:
        return one(), other()
    with ThreadPoolExecutor(max_workers=1) as pool:
        # NumPy's handling of errors, for one, belongs to the context.
        waiting = pool.submit(copy_context().run, other)
        return one(), waiting.result()


def _directions_of_free(samples: Samples) -> Directions | None:
    """Returns the directions of the label-free gradients at the last checkpoint."""
    if samples.free is None:
        return None
    return directions(Chosen(samples.free, samples.comparable, samples.free.shape[1] - 1))


def _label_free(
    samples: Samples, pointing: Directions | None, damping: float
) -> tuple[LabelErrors | None, Floats | None, Memorised | None]:
    """Computes what follows from label-free gradients: doubts about labels, outliers, memorised labels."""
    if samples.free is None:
        return None, None, None
    usable = samples.comparable
    last = samples.free.shape[1] - 1
    labels = influence = None
    if samples.target is not None:
        every = np.ones(len(samples), dtype=bool)
        checkpoints = [Chosen(samples.free, every, part) for part in range(last + 1)]
        judged = usable & samples.usable
        labels = label_errors(checkpoints, samples.target, judged, damping=damping)
    if labels is not None and labels.influence is not None:
        influence = labels.influence[usable]
        if np.isnan(influence).any():  # by other samples than all
            influence = None
    rows = Chosen(samples.free, usable, last)
    outlier = _spread(outlying(rows, pointing, influence, damping=damping), usable)
    if labels is None or samples.predicted is None or samples.target is None:
        return labels, outlier, None
    # The most doubtful alone: of those between two classes a model may predict either.
    most = np.argsort(-labels.doubt, kind="stable")[: labels.expected or 0]
    return labels, outlier, memorised(labels.doubted, samples.predicted, samples.target, most)


def _duplicates(
    samples: Samples, pointing: Directions, free: Directions | None, threshold: float | None
) -> Duplicates:
    """Finds near-duplicates by label-free gradients where there are any, else by those of the loss."""
    usable, cosine = samples.usable, _ALIKE_BY_LOSS
    apart: float | None = _APART
    if samples.free is not None and free is not None:
        usable = samples.comparable
        # What all samples share makes them look alike, whatever they are.
        last = samples.free.shape[1] - 1
        rows, _ = shortened(Chosen(samples.free, usable, last))
        every = np.ones(len(rows), dtype=bool)
        pointing = directions(Chosen(rows, every, centred=True))
        if pointing.lengths.max(initial=0.0) <= _ROUNDING * free.lengths.max(initial=0.0):
            pointing = free  # all are the same sample: only rounding is left without the mean
        is_exact = len(pointing) <= EXACT_UP_TO
        cosine = _ALIKE if is_exact else _ALIKE_OF_MANY
    if threshold is not None:
        cosine, apart = threshold, None
    found = near_duplicates(samples.index[usable], pointing, threshold=cosine, apart=apart)
    group = np.zeros(len(samples), dtype=np.int64)
    group[usable] = found.group
    return replace(found, group=group)


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
