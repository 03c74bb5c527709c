"""Measures what the samples with the top scores are worth: the loss after training without them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pergrad.errors import EvaluationError
from pergrad.evaluate.methods import Methods, named, scores_of
from pergrad.evaluate.results import Evaluation
from pergrad.evaluate.task import Floats, Job, Progress, Task, outputs_of

__all__ = ["removal"]


def removal(
    methods: Methods,
    task: Task,
    *,
    k: int = 10,
    repeats: int = 3,
    seeds: int | Sequence[int] = 1,
    baselines: bool = True,
    confidence: float = 0.95,
    watch: Progress | None = None,
) -> Evaluation:
    """Loss at a query after training without its top k samples, minus the loss with all samples.

    For each query and method, `repeats` models are trained without the k samples of the highest scores; the
    same seeds with all samples are the reference. A good method removes what the query depends on, so greater
    is better. The number of models is about queries × methods × repeats for each seed: take few queries.

    Args:
        methods: as in `lds`.
        task: how to train, the data, the queries and the loss; `task.output` replaces the loss.
        k: number of samples to remove.
        repeats: models trained without each set of samples.
        seeds: how many, or which; each has its own scored model.
        baselines: also measure random scores, loss, nearest inputs and features, and BM25, where they apply.
        confidence: of the intervals.
        watch: called as watch(done, total, what) after each model.
    """
    count = len(task.dataset)
    if not 0 < k < count:
        raise EvaluationError(f"k={k} of {count} samples leaves nothing to remove, or to train on")
    if repeats < 1:
        raise EvaluationError(f"repeats={repeats}: train at least one model without the samples")
    chosen, asked = named(methods, baselines=baselines)
    each = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    values: dict[str, list[Floats]] = {}
    notes: list[str] = []
    for seed in each:
        base = seed * (repeats + 1)
        everything = torch.arange(count)
        scores, told = scores_of(chosen, task, task.train(everything, base), seed, asked=asked)
        notes += [note for note in told if note not in notes]
        tops = {name: _tops(matrix, k) for name, matrix in scores.items()}
        sets = sorted({(), *(top for by_query in tops.values() for top in by_query)})
        jobs: list[Job] = [
            (everything[~torch.isin(everything, torch.tensor(top, dtype=torch.long))], base + 1 + r)
            for top in sets
            for r in range(repeats)
        ]
        outputs = outputs_of(task, jobs, watch=watch, what=f"retraining, seed {seed}")
        after = dict(zip(sets, outputs.reshape(len(sets), repeats, -1).mean(1), strict=True))
        for name, by_query in tops.items():
            lost = [after[()][q] - after[top][q] for q, top in enumerate(by_query)]
            values.setdefault(name, []).append(np.array(lost))
    about = {"samples removed": k, "models without each": repeats, "seeds": len(each)}
    about["queries"] = len(task.queries)
    stacked = {name: np.stack(v) for name, v in values.items()}
    return Evaluation("loss added", stacked, about, tuple(notes), True, confidence)


def _tops(scores: Floats, k: int) -> list[tuple[int, ...]]:
    """Returns the k samples of the highest scores for each query, as sorted tuples."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [tuple(sorted(map(int, row))) for row in order]
