"""Measures how well scores find planted wrong labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pergrad.attribution.grading import ranked
from pergrad.errors import EvaluationError
from pergrad.evaluate.baselines import by_features, by_inputs
from pergrad.evaluate.methods import Method, Methods, called, checked, named
from pergrad.evaluate.results import Evaluation
from pergrad.evaluate.task import Floats, Task, Trained, final

__all__ = ["flipped", "mislabelled"]


def flipped(labels: Tensor, share: float = 0.1, *, seed: int = 0) -> tuple[Tensor, list[int]]:
    """Gives a share of the labels another class, drawn at random; returns all labels and the wrong places.

    >>> import torch
    >>> labels, wrong = flipped(torch.tensor([0, 1, 2, 0, 1, 2]), 0.5)
    >>> len(wrong), [int(labels[i]) == i % 3 for i in range(6)].count(True)
    (3, 3)
    """
    classes = labels.unique()
    if labels.dim() != 1 or labels.is_floating_point() or len(classes) < 2:
        raise EvaluationError(
            f"labels of shape {tuple(labels.shape)} and {len(classes)} classes cannot be flipped: pass a "
            "vector of whole numbers with at least two classes"
        )
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    places = torch.searchsorted(classes, labels[wrong])
    shift = torch.randint(1, len(classes), (len(wrong),), generator=generator)
    changed = labels.clone()
    changed[wrong] = classes[(places + shift) % len(classes)]
    return changed, sorted(wrong.tolist())


def mislabelled(
    methods: Methods,
    task: Task,
    wrong: Sequence[int] | None = None,
    *,
    seeds: int | Sequence[int] = 3,
    baselines: bool = True,
    confidence: float = 0.95,
) -> Evaluation:
    """Average precision of finding samples whose labels are known to be wrong.

    The training data of the task has the wrong labels; see `flipped`. A method gives a suspicion for each
    sample, (n,), or (n, n) scores of the training data with itself as queries, whose diagonal, the
    self-influence, is the suspicion. The queries of the task are not used.

    Args:
        methods: as in `lds`; functions are called as method(what train returned, dataset, dataset).
        task: how to train, the data with wrong labels, and the loss.
        wrong: indices of the samples with wrong labels; by default `task.wrong`.
        seeds: how many models are trained, or their seeds.
        baselines: also measure random scores, the loss, and the labels of nearest inputs and features.
        confidence: of the intervals.
    """
    count = len(task.dataset)
    wrong = task.wrong if wrong is None else wrong
    if wrong is None:
        raise EvaluationError("no wrong labels are known: pass wrong=, indices of training samples")
    is_wrong = np.zeros(count, dtype=bool)
    if not len(wrong) or not all(0 <= i < count for i in wrong):
        raise EvaluationError(
            f"wrong must hold indices of the {count} training samples, got {len(wrong)} of which some may "
            "be out of range"
        )
    is_wrong[list(wrong)] = True
    own = replace(task, queries=task.dataset)
    chosen, asked = named(methods, baselines=baselines)
    chosen = {
        name: method for name, method in chosen.items() if name in asked or name in _BASELINES
    }
    each = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    values: dict[str, list[Floats]] = {}
    notes: list[str] = []
    for seed in each:
        trained = task.train(torch.arange(count), seed)
        for name, method in chosen.items():
            try:
                suspicion = _suspicion(name, method, own, trained, seed)
            except EvaluationError as error:
                if name in asked:
                    raise
                notes += [note] if (note := f"{name} left out: {error}") not in notes else []
                continue
            values.setdefault(name, []).append(_precisions(suspicion, is_wrong))
    about = {"wrong labels": int(is_wrong.sum()), "training samples": count, "seeds": len(each)}
    stacked = {name: np.stack(v) for name, v in values.items()}
    return Evaluation("AP", stacked, about, tuple(notes), False, confidence)


def _suspicion(name: str, method: Method, own: Task, trained: Trained, seed: int) -> Floats:
    if isinstance(method, str) and method in _BASELINES:
        return _BASELINES[method](own, trained, seed)
    made = called(method, own, trained, seed)
    made = made.detach().cpu().double().numpy() if isinstance(made, Tensor) else np.asarray(made)
    if made.shape == (len(own.dataset),):
        made = made.astype(np.float64)
        if not np.isfinite(made).all():
            raise EvaluationError(f"suspicions of {name!r} are not finite")
        return made
    return np.diagonal(checked(name, made, own))


def _precisions(suspicion: Floats, is_wrong: np.ndarray) -> Floats:
    """Returns the precision at the rank of each wrong sample; their mean is the average precision."""
    hits = is_wrong[ranked(suspicion)]
    return (np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits]


def _disagreement(
    near: Callable[[Task, Trained, int], Floats],
) -> Callable[[Task, Trained, int], Floats]:
    def suspicion(task: Task, trained: Trained, seed: int) -> Floats:
        same = near(task, trained, seed)
        everyone = near(replace(task, label=_one_class), trained, seed)
        for matrix in (same, everyone):
            np.fill_diagonal(matrix, 0.0)
        return 1 - same.sum(1) / np.maximum(everyone.sum(1), 1e-300)

    return suspicion


def _one_class(*batch: object) -> Tensor:
    first = next(part for part in batch if isinstance(part, Tensor))
    return torch.zeros(len(first), dtype=torch.long)


_BASELINES: dict[str, Callable[[Task, Trained, int], Floats]] = {
    "random": lambda task, trained, seed: np.random.default_rng(seed).random(len(task.dataset)),
    "loss": lambda task, trained, seed: task.losses(final(trained), task.dataset),
    "nearest inputs": _disagreement(by_inputs),
    "nearest features": _disagreement(by_features),
}
