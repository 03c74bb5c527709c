"""Scores by pergrad's own gradients: the index as it comes, and plain dots to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pergrad.evaluate.task import Floats, Task, Trained, final
from pergrad.index import Index

__all__ = ["GRADIENTS", "by_index"]


def by_index(task: Task, trained: Trained, seed: int, **options: Any) -> Floats:  # (queries, n)
    """Returns the scores of a `pergrad.Index` over all checkpoints that `task.train` returned.

    Args:
        task: the data and the loss.
        trained: what `task.train` returned.
        seed: of the projection.
        options: of `Index.build`, such as `preconditioner`, `damping` or `dim`.
    """
    states = [trained] if isinstance(trained, nn.Module) else list(trained)
    index = Index.build(
        states[-1],
        task.dataset,
        loss=task.loss,
        checkpoints=states[:-1],
        collate=task.collate,
        seed=seed,
        quiet=True,
        **options,
    )
    rows = [index.scores(batch) for batch in task.batches(task.queries)]
    return torch.cat(rows).double().cpu().numpy()


def _final_model(task: Task, trained: Trained, seed: int, **options: Any) -> Floats:
    return by_index(task, final(trained), seed, **options)


def _ekfac(task: Task, trained: Trained, seed: int) -> Floats:
    # Whole gradients: the noise of a sketch drowns the directions that EK-FAC stretches most.
    return by_index(task, trained, seed, preconditioner="ekfac", projection="none")


def _dots(task: Task, trained: Trained, seed: int) -> Floats:
    return by_index(task, final(trained), seed, preconditioner="none", projection="none")


GRADIENTS: dict[str, Callable[..., Floats]] = {
    "index": by_index,
    "index, final model": _final_model,
    "index, EK-FAC": _ekfac,
    "gradient dots": _dots,
}
