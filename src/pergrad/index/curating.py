"""Chooses training data by an index: what helps targets, without what harms, without duplicates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pergrad.attribution.buckets import Recall
from pergrad.attribution.duplicates import near_duplicates
from pergrad.audit.streaming.files import write_whole
from pergrad.errors import IndexingError
from pergrad.index.store.numbers import unscaled
from pergrad.index.store.store import Store

__all__ = ["chosen_for", "deduplicated", "is_count", "read_list", "without", "write_list"]


def by_sample(scores: Tensor, indices: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Sums the scores of the rows of each sample, (q, samples): rows of tokens add up to their sample."""
    samples, inverse = np.unique(indices, return_inverse=True)
    if len(samples) == len(indices) and np.array_equal(samples, indices):
        return scores, indices
    total = scores.new_zeros(len(scores), len(samples))
    return total.index_add_(1, torch.from_numpy(inverse), scores), samples


def is_count(value: Any) -> bool:
    """Whether a value is an integer, of NumPy too; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def chosen_for(
    scores: Tensor, indices: np.ndarray, count: int, groups: Sequence[Any] | None = None
) -> list[int]:
    """Returns the indices of the samples that help a set of targets most, in increasing order.

    As in LESS, scores are averaged over the targets of each group, and a sample counts by its best group.

    >>> scores = torch.tensor([[1.0, 0.0, 5.0], [0.0, 2.0, -5.0]])
    >>> chosen_for(scores, np.arange(3), 1), chosen_for(scores, np.arange(3), 1, groups=[0, 1])
    ([1], [2])
    """
    scores, indices = by_sample(scores, indices)
    if not is_count(count) or not 0 < count <= len(indices):
        raise IndexingError(f"count must be from 1 to {len(indices)} samples, got {count!r}")
    names = [0] * len(scores) if groups is None else np.asarray(groups).tolist()
    if np.ndim(names) != 1 or len(names) != len(scores):
        shape = np.shape(names)
        raise IndexingError(f"groups has entries of shape {shape} for {len(scores)} targets")
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    which = torch.tensor([numbers[name] for name in names])
    means = [scores[which == group].mean(0) for group in which.unique()]
    best = torch.stack(means).max(0).values.nan_to_num(nan=-torch.inf)
    return sorted(indices[best.topk(count).indices.numpy()].tolist())


def without(scores: Tensor, indices: np.ndarray, count: int) -> list[int]:
    """Returns the indices of all samples but the `count` that harm the targets most.

    Only samples with a negative mean score are left out, so that it may be fewer.
    """
    scores, indices = by_sample(scores, indices)
    if not is_count(count) or not 0 <= count < len(indices):
        raise IndexingError(f"count must be from 0 to {len(indices) - 1} samples, got {count!r}")
    mean = scores.mean(0).nan_to_num(nan=torch.inf)
    worst = mean.topk(count, largest=False)
    gone = worst.indices[worst.values < 0].numpy()
    return sorted(np.delete(indices, gone).tolist())


def deduplicated(store: Store, cosine: float) -> tuple[list[int], list[list[int]], Recall | None]:
    """Returns the indices to keep, the first of each group, and the groups of near-duplicates.

    Two samples are near-duplicates if the cosine of their rows over all checkpoints is at least `cosine`. Of
    more than 20,000 samples only those in near buckets are compared: the recall says how many pairs that
    finds. Rows of zeros, and rows that are not finite, are duplicates of nothing.
    """
    if not 0 < cosine <= 1:
        raise IndexingError(f"cosine must be above 0 and at most 1, got {cosine!r}")
    facts = store.facts
    if facts.token is not None:
        raise IndexingError(
            "this index has a row for each token, but duplicates are found among samples: build an index "
            "with per='sample'"
        )
    found = near_duplicates(facts.index, _Rows(store), threshold=cosine)
    groups: dict[int, list[int]] = {}
    for index, group in zip(facts.index.tolist(), found.group.tolist(), strict=True):
        if group:
            groups.setdefault(group, []).append(index)
    gone = {index for group in groups.values() for index in group[1:]}
    kept = sorted(index for index in facts.index.tolist() if index not in gone)
    return kept, list(groups.values()), found.recall


class _Rows:
    """The rows of a store over all checkpoints, (n, c·k), read when they are asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.shape: tuple[int, ...] = (len(store), store.width)
        self.dtype = np.dtype(np.float64 if store.dtype == "float64" else np.float32)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        numbers = np.arange(len(self))[rows]
        values, scale = self._store.at(numbers)
        found = unscaled(values, scale, self._store.dtype).flatten(1).numpy()
        # A row that is not finite becomes zeros: it has no direction.
        return np.where(np.isfinite(found).all(axis=1, keepdims=True), found, 0.0)


def write_list(path: str | Path, indices: Iterable[int]) -> Path:
    """Writes indices as JSON, which `read_list` reads; `torch.utils.data.Subset` takes them."""
    target = Path(path)
    given = indices.tolist() if hasattr(indices, "tolist") else [*indices]
    wrong = [index for index in given if not is_count(index) or index < 0]
    if wrong:
        raise IndexingError(f"a list of indices holds integers of at least 0, got {wrong[0]!r}")
    write_whole(target, (json.dumps([int(index) for index in given]) + "\n").encode())
    return target


def read_list(path: str | Path) -> list[int]:
    """Reads a list of indices."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise IndexingError(f"{path} holds no list of indices: {error}") from error
    if not isinstance(found, list) or not all(is_count(index) and index >= 0 for index in found):
        raise IndexingError(
            f"{path} holds no list of indices: it must hold integers of at least 0 in brackets"
        )
    return found
