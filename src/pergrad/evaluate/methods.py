"""Turns what a user calls a method into a matrix of scores: queries × training samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pergrad.errors import EvaluationError
from pergrad.evaluate.baselines import BASELINES
from pergrad.evaluate.gradients import GRADIENTS
from pergrad.evaluate.peers import PEERS
from pergrad.evaluate.task import Floats, Task, Trained

__all__ = ["BUILT_IN", "Method", "Methods", "called", "checked", "named", "scores_of"]

# A matrix; a function of (what train returned, dataset, queries) that makes one; or the name of a known one.
Method = Any
Methods = Method | Sequence[Method] | Mapping[str, Method]

BUILT_IN: dict[str, Callable[[Task, Trained, int], Any]] = {**GRADIENTS, **PEERS, **BASELINES}


def named(methods: Methods, *, baselines: bool = True) -> tuple[dict[str, Method], tuple[str, ...]]:
    """Returns methods by name, those of the user first, then the baselines; and the names of the user's."""
    if isinstance(methods, Mapping):
        found = dict(methods)
    else:
        is_one = isinstance(methods, str) or callable(methods) or _is_matrix(methods)
        found = {}
        for method in [methods] if is_one else methods:
            name = method if isinstance(method, str) else getattr(method, "__name__", "scores")
            if name in found:
                raise EvaluationError(
                    f"two methods are called {name!r}: pass a dict from name to method"
                )
            found[name] = method
    for name, method in found.items():
        if isinstance(method, str) and method not in BUILT_IN:
            raise EvaluationError(
                f"method {name!r} is not known; pass a matrix, a function, or one of "
                f"{', '.join(map(repr, BUILT_IN))}"
            )
    asked = tuple(found)
    if baselines:
        found |= {name: name for name in BASELINES if name not in found}
    if not found:
        raise EvaluationError(
            "no methods to evaluate: pass a matrix of scores, a function or a name"
        )
    return found, asked


def scores_of(
    methods: Mapping[str, Method],
    task: Task,
    trained: Trained,
    seed: int,
    *,
    asked: Sequence[str] = (),
) -> tuple[dict[str, Floats], list[str]]:
    """Returns the scores of each method, and notes on baselines that do not apply.

    A baseline that is not in `asked` and that refuses the task is left out.
    """
    found, notes = {}, []
    for name, method in methods.items():
        try:
            found[name] = checked(name, called(method, task, trained, seed), task)
        except EvaluationError as error:
            if name not in BASELINES or name in asked:
                raise
            notes.append(f"{name} left out: {error}")
    return found, notes


def called(method: Method, task: Task, trained: Trained, seed: int) -> Any:
    """Returns what a method gives, as it gives it."""
    if isinstance(method, str):
        return BUILT_IN[method](task, trained, seed)
    if callable(method):
        return method(trained, task.dataset, task.queries)
    return method


def checked(name: str, scores: Any, task: Task) -> Floats:
    """Returns scores as float64; refuses another shape, and numbers that are not finite."""
    if isinstance(scores, torch.Tensor):
        scores = scores.detach().cpu().double().numpy()
    scores = np.asarray(scores, dtype=np.float64)
    expected = (len(task.queries), len(task.dataset))
    if scores.shape != expected:
        hint = ": transpose it" if scores.shape == expected[::-1] else ""
        raise EvaluationError(
            f"the scores of {name!r} have shape {scores.shape}, not (queries, training samples) = "
            f"{expected}{hint}"
        )
    bad = ~np.isfinite(scores)
    if bad.any():
        query, sample = map(int, np.argwhere(bad)[0])
        raise EvaluationError(
            f"{bad.sum()} scores of {name!r} are not finite, the first of query {query} and sample {sample}"
        )
    return scores


def _is_matrix(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor) or (
        isinstance(value, Sequence)
        and bool(value)
        and isinstance(value[0], Sequence)
        and not isinstance(value[0], str)
    )
