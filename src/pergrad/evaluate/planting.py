"""Plants what a good method must find: near-duplicates, facts and wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pergrad.errors import EvaluationError
from pergrad.evaluate.methods import Methods, named, scores_of
from pergrad.evaluate.results import Evaluation
from pergrad.evaluate.task import Floats, Task

__all__ = ["duplicates", "facts"]


def facts(
    methods: Methods,
    task: Task,
    planted: Sequence[int | Sequence[int]] | None = None,
    *,
    k: int = 1,
    seeds: int | Sequence[int] = 1,
    baselines: bool = True,
    confidence: float = 0.95,
) -> Evaluation:
    """Share of the queries whose planted sample is among the top k.

    Args:
        methods: as in `lds`.
        task: how to train, the data, the queries and the loss.
        planted: for each query the index of the training sample that states its fact, or several indices,
            of which one must be found; by default `task.planted`.
        k: ranks that count; 1: the planted sample must come first. Ties count as not found.
        seeds: how many models are trained on all samples, or their seeds.
        baselines: also measure random scores, loss, nearest inputs and features, and BM25, where they apply.
        confidence: of the intervals.

    >>> import torch
    >>> from pergrad.evaluate import Task, facts
    >>> data = [torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])]
    >>> task = Task(
    ...     lambda indices, seed: torch.nn.Linear(1, 1), data, data[1:], lambda m, x: x.sum(1)
    ... )
    >>> found = facts("BM25", task, planted=[1, 2], baselines=False)
    >>> found["BM25"].mean
    1.0
    """
    planted = task.planted if planted is None else planted
    if planted is None:
        raise EvaluationError(
            "no planted samples are known: pass planted=, for each query the index of its training sample"
        )
    wanted = [_indices(at, len(task.dataset)) for at in planted]
    if len(wanted) != len(task.queries):
        raise EvaluationError(
            f"planted has {len(wanted)} entries for {len(task.queries)} queries: pass one for each"
        )
    if k < 1:
        raise EvaluationError(f"k={k}: at least the first rank must count")
    chosen, asked = named(methods, baselines=baselines)
    each = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    values: dict[str, list[Floats]] = {}
    notes: list[str] = []
    for seed in each:
        trained = task.train(torch.arange(len(task.dataset)), seed)
        scores, told = scores_of(chosen, task, trained, seed, asked=asked)
        notes += [note for note in told if note not in notes]
        for name, matrix in scores.items():
            hits = [_rank(row, at) <= k for row, at in zip(matrix, wanted, strict=True)]
            values.setdefault(name, []).append(np.array(hits, dtype=np.float64))
    about = {"seeds": len(each), "queries": len(wanted), "training samples": len(task.dataset)}
    title = "first" if k == 1 else f"in top {k}"
    stacked = {name: np.stack(v) for name, v in values.items()}
    return Evaluation(title, stacked, about, tuple(notes), True, confidence)


def duplicates(
    methods: Methods,
    task: Task,
    *,
    count: int | None = None,
    noise: float = 0.1,
    k: int = 1,
    seeds: int | Sequence[int] = 1,
    draw: int = 0,
    baselines: bool = True,
    confidence: float = 0.95,
) -> Evaluation:
    """Share of changed copies of training samples whose original is among the top k.

    The copies replace the queries of the task. The first part of an item is changed and the rest, such as its
    label, is kept: normal noise is added to numbers, and tokens are replaced by those of other samples.

    Args:
        methods: as in `lds`.
        task: how to train, the data and the loss.
        count: number of copies; by default 50, or all samples if there are fewer.
        noise: standard deviation of the noise, as a share of the inputs'; or share of tokens replaced.
        k: ranks that count. Ties count as not found.
        seeds: how many models are trained on all samples, or their seeds.
        draw: seed of the copies.
        baselines: also measure random scores, loss, nearest inputs and features, and BM25, where they apply.
        confidence: of the intervals.
    """
    count = min(50, len(task.dataset)) if count is None else count
    if not 0 < count <= len(task.dataset):
        raise EvaluationError(
            f"count={count}: choose 1 to {len(task.dataset)} training samples to copy"
        )
    generator = torch.Generator().manual_seed(draw)
    chosen = torch.randperm(len(task.dataset), generator=generator)[:count].tolist()
    first = [_parts(task.dataset[i])[0] for i in chosen]
    copies = []
    for place, part in zip(chosen, first, strict=True):
        others = first[int(torch.randint(count, (), generator=generator))]
        changed = _changed(
            part,
            noise,
            torch.stack(first).float().std() if _same(first) else None,
            others,
            generator,
        )
        item = task.dataset[place]
        copies.append(_with(item, changed))
    return facts(
        methods,
        replace(task, queries=copies),
        chosen,
        k=k,
        seeds=seeds,
        baselines=baselines,
        confidence=confidence,
    )


def _same(parts: list[Any]) -> bool:
    return all(isinstance(p, Tensor) and p.shape == parts[0].shape for p in parts)


def _parts(item: Any) -> Sequence[Any]:
    return (
        list(item.values())
        if isinstance(item, dict)
        else item
        if isinstance(item, tuple | list)
        else [item]
    )


def _with(item: Any, first: Any) -> Any:
    if isinstance(item, dict):
        return {name: first if n == 0 else part for n, (name, part) in enumerate(item.items())}
    if isinstance(item, tuple | list):
        return (first, *item[1:])
    return first


def _changed(
    part: Any, noise: float, spread: Tensor | None, other: Any, generator: torch.Generator
) -> Tensor:
    if not isinstance(part, Tensor):
        raise EvaluationError(
            f"the first part of an item is a {type(part).__name__}: copies are made of tensors; make the "
            "changed items yourself and call facts"
        )
    if part.is_floating_point():
        scale = part.std() if spread is None else spread
        return part + noise * scale * torch.randn(part.shape, generator=generator, dtype=part.dtype)
    swapped = torch.rand(part.shape, generator=generator) < noise
    places = torch.randint(other.numel(), part.shape, generator=generator)
    return torch.where(swapped, other.flatten()[places], part)


def _indices(at: int | Sequence[int], count: int) -> list[int]:
    found = [int(at)] if isinstance(at, int | np.integer) else [int(i) for i in at]
    if not found or not all(0 <= i < count for i in found):
        raise EvaluationError(
            f"planted samples {found} are no indices of the {count} training samples"
        )
    return found


def _rank(scores: Floats, wanted: list[int]) -> int:
    """Returns the rank, from 1, of the best of the wanted samples; others with its score come first."""
    others = np.delete(scores, wanted)
    return 1 + int((others >= scores[wanted].max()).sum())
