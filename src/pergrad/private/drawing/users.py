"""Defines `UserDataset`: one item for each user, for privacy of users and not of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pergrad.errors import PrivacyError
from pergrad.private.planning.plain import is_integer

__all__ = ["UserDataset"]


class UserDataset(Dataset[Any]):
    """Items are users: `samples` of each user's samples, stacked, so that tensors are (samples, ...).

    A plan over it draws users, and `Step(views=True)` averages the gradients of a user's samples before it
    clips them: neighbouring data sets then differ in all samples of one user. A user with more samples has
    some of them drawn at random whenever the item is read; one with fewer has them repeated.

    Args:
        dataset: a map-style data set.
        users: the user of each sample: numbers, strings or a tensor.
        samples: of each user in a batch.
        collate: stacks a user's samples; by default as a `DataLoader` does.

    >>> import torch
    >>> from pergrad.private import UserDataset
    >>> data = torch.utils.data.TensorDataset(torch.arange(5.0))
    >>> users = UserDataset(data, ["ann", "bob", "ann", "ann", "bob"], samples=2)
    >>> len(users), users[1]
    (2, [tensor([1., 4.])])
    """

    def __init__(
        self,
        dataset: Any,
        users: Sequence[Any] | Tensor,
        samples: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        names = users.tolist() if isinstance(users, Tensor) else [*users]
        if len(names) != len(dataset):
            raise PrivacyError(
                f"users must name the user of each of {len(dataset)} samples, got {len(names)} names"
            )
        if not is_integer(samples) or samples < 1:
            raise PrivacyError(f"samples must be a positive integer, got {samples!r}")
        of_user: dict[Any, list[int]] = {}
        for index, name in enumerate(names):
            of_user.setdefault(name, []).append(index)
        self._dataset, self._samples, self._collate = dataset, samples, collate
        self._indices = [*of_user.values()]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        indices = self._indices[number]
        if len(indices) > self._samples:
            chosen = torch.randperm(len(indices))[: self._samples].tolist()
            indices = [indices[k] for k in chosen]
        rows = [self._dataset[indices[k % len(indices)]] for k in range(self._samples)]
        return self._collate(rows)
