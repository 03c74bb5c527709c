"""Computes the linear datamodeling score: do sums of scores predict what retraining on subsets gives?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from pergrad.errors import EvaluationError
from pergrad.evaluate.methods import Methods, named, scores_of
from pergrad.evaluate.results import Evaluation
from pergrad.evaluate.task import Floats, Progress, Task, outputs_of

__all__ = ["correlations", "draw_subsets", "lds"]


def lds(
    methods: Methods,
    task: Task,
    *,
    subsets: int = 100,
    fraction: float = 0.5,
    repeats: int = 3,
    seeds: int | Sequence[int] = 3,
    baselines: bool = True,
    confidence: float = 0.95,
    watch: Progress | None = None,
) -> Evaluation:
    """Linear datamodeling score: rank correlation of Σ_{n in subset} score_n with the retrained output.

    For each seed a model is trained on all samples and scored; `subsets` random subsets of the same size
    are drawn; `repeats` models are trained on each; their outputs at a query are averaged. The score of a
    query is Spearman's correlation over the subsets between the sum of the subset's scores and that output.
    All methods are measured on the same subsets and models.

    Scores are positive where a sample helps: training on it lowers the loss at the query. Scores with the
    other sign give the negative LDS, and a note.

    Args:
        methods: a (queries, training samples) matrix, a function that makes one of (what `task.train`
            returned, dataset, queries), the name of a known method, or a dict or list of these. A matrix
            belongs to one model, so it is the same for all seeds.
        task: how to train, the data, the queries and the loss.
        subsets: number of subsets of each seed.
        fraction: share of the training samples in a subset.
        repeats: models trained on each subset.
        seeds: how many, or which.
        baselines: also measure random scores, loss, nearest inputs and features, and BM25, where they apply.
        confidence: of the intervals.
        watch: called as watch(done, total, what) after each model.

    Returns:
        An evaluation whose `values` are the correlations, by method: (seeds, queries).

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from pergrad.evaluate import Task, lds
    >>> x = torch.arange(10.0)[:, None]
    >>> class Mean(torch.nn.Module):  # predicts the mean of its training samples
    ...     def __init__(self, value):
    ...         super().__init__()
    ...         self.value = value
    >>> task = Task(
    ...     lambda indices, seed: Mean(x[indices].mean()),
    ...     TensorDataset(x),
    ...     TensorDataset(torch.tensor([[-20.0], [40.0]])),
    ...     lambda model, x: (model.value - x[:, 0]) ** 2,
    ... )
    >>> exact = torch.stack(
    ...     [-x[:, 0], x[:, 0]]
    ... )  # small numbers help the first query, large the second
    >>> found = lds({"exact": exact}, task, subsets=20, repeats=1, seeds=1)
    >>> round(found["exact"].mean, 3)
    1.0
    """
    _refuse(subsets, fraction, repeats, len(task.dataset))
    chosen, asked = named(methods, baselines=baselines)
    each = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not each:
        raise EvaluationError(
            f"seeds={seeds!r} is no seed: pass a number of seeds or a list of them"
        )
    values: dict[str, list[Floats]] = {}
    notes: list[str] = []
    reliabilities = []
    for seed in each:
        count = len(task.dataset)
        base = seed * (subsets * repeats + 1)
        everything = torch.arange(count)
        scores, told = scores_of(chosen, task, task.train(everything, base), seed, asked=asked)
        notes += [note for note in told if note not in notes]
        masks = draw_subsets(count, subsets, fraction, seed)
        jobs = [
            (everything[torch.from_numpy(mask)], base + 1 + k * repeats + r)
            for k, mask in enumerate(masks)
            for r in range(repeats)
        ]
        outputs = outputs_of(task, jobs, watch=watch, what=f"retraining, seed {seed}")
        outputs = outputs.reshape(subsets, repeats, -1)
        reliabilities.append(_reliability(outputs))
        for name, matrix in scores.items():
            values.setdefault(name, []).append(correlations(matrix, masks, outputs.mean(1)))
    about = {
        "subsets": subsets,
        "models on each": repeats,
        "of the samples in a subset": f"{fraction:.0%}",
        "seeds": len(each),
        "queries": len(task.queries),
    }
    if repeats > 1:
        bound = float(np.sqrt(max(float(np.mean(reliabilities)), 0.0)))
        notes.append(f"perfect scores would give about {bound:.2f}: retraining is noisy")
    made = Evaluation(
        "LDS", {name: np.stack(v) for name, v in values.items()}, about, (), True, confidence
    )
    reversed_ = [name for name in asked if made[name].high < 0]
    notes += [
        f"{name} predicts the opposite: is its sign reversed? scores are positive where a sample helps"
        for name in reversed_
    ]
    return Evaluation("LDS", made.values, about, tuple(notes), True, confidence)


def draw_subsets(count: int, subsets: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Draws subsets of equal size without replacement: (subsets, count), true where a sample is in it."""
    generator = np.random.default_rng([seed, 25])
    masks = np.zeros((subsets, count), dtype=bool)
    for mask in masks:
        mask[generator.permutation(count)[: round(fraction * count)]] = True
    return masks


def correlations(scores: Floats, masks: NDArray[np.bool_], outputs: Floats) -> Floats:
    """Returns Spearman's correlation over the subsets, for each query; 0 where one side is constant.

    Args:
        scores: (queries, training samples).
        masks: (subsets, training samples), true where a sample is in the subset.
        outputs: (subsets, queries), what the models of a subset give, averaged.
    """
    predicted = rankdata(scores @ masks.T.astype(np.float64), axis=1)
    measured = rankdata(outputs.T, axis=1)
    predicted -= predicted.mean(1, keepdims=True)
    measured -= measured.mean(1, keepdims=True)
    length = np.sqrt((predicted**2).sum(1) * (measured**2).sum(1))
    return (predicted * measured).sum(1) / np.where(length > 0, length, 1.0)


def _reliability(outputs: Floats) -> float:  # (subsets, repeats, queries)
    """Share of the averaged output's variance that is due to the subset: its root bounds the LDS."""
    repeats = outputs.shape[1]
    if repeats < 2:
        return float("nan")
    between = repeats * outputs.mean(1).var(0, ddof=1)
    within = outputs.var(1, ddof=1).mean(0)
    shares = np.divide(between - within, between, out=np.zeros_like(between), where=between > 0)
    return float(shares.mean())


def _refuse(subsets: int, fraction: float, repeats: int, count: int) -> None:
    if subsets < 3:
        raise EvaluationError(f"subsets={subsets}: a rank correlation needs at least 3, better 100")
    if repeats < 1:
        raise EvaluationError(f"repeats={repeats}: train at least one model on each subset")
    if not 0 < fraction < 1 or not 0 < round(fraction * count) < count:
        raise EvaluationError(
            f"fraction={fraction:g} of {count} samples leaves none in a subset, or all: take about 0.5"
        )
