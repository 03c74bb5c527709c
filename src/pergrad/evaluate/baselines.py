"""Scores training samples without gradients: what every attribution method must beat."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pergrad.errors import EvaluationError
from pergrad.evaluate.task import Floats, Task, Trained, evaluating, final

__all__ = ["BASELINES", "bm25", "by_bm25", "by_features", "by_inputs", "by_loss", "by_random"]

_WORD = re.compile(r"\w+")


def by_random(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Draws scores from a normal distribution."""
    return np.random.default_rng(seed).normal(size=(len(task.queries), len(task.dataset)))


def by_loss(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Scores a sample by its training loss, the same for every query."""
    losses = task.losses(final(trained), task.dataset)
    return np.broadcast_to(losses, (len(task.queries), len(losses)))


def by_inputs(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Scores a sample by the nearness of its input, exp(-2 d²/median²); other classes get zero."""
    of = task.inputs or _first_tensor
    return _near(task, lambda *batch: of(*batch).flatten(1).double())


def by_features(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Scores a sample by the nearness of its features in the final model; other classes get zero."""
    model = final(trained)
    if task.features is not None:
        given = task.features
        return _near(task, lambda *batch: given(model, *batch).flatten(1).double())
    with evaluating(model), torch.no_grad(), _Inputs(model, task) as inputs:
        return _near(task, inputs)


def by_bm25(task: Task, trained: Trained, seed: int) -> Floats:  # (queries, n)
    """Scores a sample by BM25 of its words or tokens, with the query's as the search."""
    documents = [_tokens(task, task.dataset[i]) for i in range(len(task.dataset))]
    searches = [_tokens(task, task.queries[i]) for i in range(len(task.queries))]
    return bm25(searches, documents)


# A baseline refuses tasks that it cannot score; `baselines_of` leaves it out there.
BASELINES: dict[str, Callable[[Task, Trained, int], Floats]] = {
    "random": by_random,
    "loss": by_loss,
    "nearest inputs": by_inputs,
    "nearest features": by_features,
    "BM25": by_bm25,
}


def bm25(
    searches: Sequence[Sequence[Any]],
    documents: Sequence[Sequence[Any]],
    *,
    k: float = 1.5,
    b: float = 0.75,
) -> Floats:  # (searches, documents)
    """Σ_w idf(w) · f (k + 1) / (f + k (1 - b + b |d| / mean |d|)) over the words w of a search.

    f counts w in the document d; idf(w) = log(1 + (N - n_w + 1/2) / (n_w + 1/2)) with n_w of N documents.

    >>> bm25([["red", "fox"]], [["red", "fox"], ["red", "dog"], ["dog"]]).round(2)
    array([[1.33, 0.43, 0.  ]])
    """
    counts = [Counter(words) for words in documents]
    lengths = np.array([len(words) for words in documents], dtype=np.float64)
    scale = k * (1 - b + b * lengths / max(lengths.mean(), 1e-12))
    places: dict[Any, tuple[list[int], list[int]]] = {}
    for n, counted in enumerate(counts):
        for word, times in counted.items():
            at, often = places.setdefault(word, ([], []))
            at.append(n)
            often.append(times)
    scores = np.zeros((len(searches), len(documents)))
    for row, words in zip(scores, searches, strict=True):
        for word in words:
            if word in places:
                at, often = places[word]
                f = np.array(often, dtype=np.float64)
                idf = math.log(1 + (len(documents) - len(at) + 0.5) / (len(at) + 0.5))
                row[at] += idf * f * (k + 1) / (f + scale[at])
    return scores


def _tokens(task: Task, item: Any) -> Sequence[Any]:
    if task.tokens is not None:
        return task.tokens(item)
    parts = list(item.values()) if isinstance(item, dict) else item
    for part in parts if isinstance(parts, tuple | list) else [parts]:
        if isinstance(part, str):
            return _WORD.findall(part.lower())
        if isinstance(part, Tensor) and part.dim() == 1 and not _is_real(part):
            return part.tolist()
    raise EvaluationError("BM25 needs texts or tokens: pass tokens=, called as tokens(item)")


def _near(task: Task, of: Callable[..., Tensor]) -> Floats:
    train, queries = (
        torch.cat([of(*batch).cpu() for batch in task.batches(data)])
        for data in (task.dataset, task.queries)
    )
    squared = torch.cdist(queries, train).square()
    near = torch.exp(-2 * squared / squared.median().clamp(min=1e-300))
    classes = [_labels(task, data) for data in (task.queries, task.dataset)]
    if classes[0] is not None and classes[1] is not None:
        near = near * (classes[0][:, None] == classes[1][None])
    return near.numpy()


def _labels(task: Task, data: Any) -> Tensor | None:
    found = []
    for batch in task.batches(data):
        if task.label is not None:
            found.append(task.label(*batch))
        elif len(batch) == 2 and isinstance(batch[1], Tensor) and batch[1].dim() == 1:
            if _is_real(batch[1]):
                return None
            found.append(batch[1])
        else:
            return None
    return torch.cat(found).cpu()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _first_tensor(*batch: Any) -> Tensor:
    for part in batch:
        if isinstance(part, Tensor):
            if not _is_real(part) and part.dim() > 1:
                break  # tokens: the distance of their numbers means nothing
            return part.flatten(1) if part.dim() > 1 else part[:, None]
    raise EvaluationError("nearest inputs need numbers: pass inputs=, called as inputs(*batch)")


class _Inputs:
    """Catches the input of the last module with parameters of its own while the loss runs."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._model, self._task, self._hooks = model, task, []  # type: ignore[var-annotated]
        self._seen: Tensor | None = None

    def __enter__(self) -> _Inputs:
        for module in self._model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._see))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            self._seen = arguments[0]

    def __call__(self, *batch: Any) -> Tensor:
        size = len(self._task.loss(self._model, *batch))
        seen = self._seen
        if seen is None or not _is_real(seen) or seen.dim() < 2 or len(seen) != size:
            raise EvaluationError(
                "no features were seen at the last module with parameters: pass features=, called as "
                "features(model, *batch)"
            )
        return (seen if seen.dim() == 2 else seen.flatten(1, -2).mean(1)).double()
