"""Takes samples out of a batch: one alone, or all of them with some replaced by others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pergrad.engine.recording.arguments import leaves, map_leaves

__all__ = ["Slices", "dims_by_size"]


def dims_by_size(values: Iterable[Any], dim: int, size: int) -> dict[int, int]:
    """Maps the id of each tensor that has `size` samples to their dimension; a vector has only one."""
    found: dict[int, int] = {}
    for value in values:
        if isinstance(value, PackedSequence):
            found[id(value)] = 0
        elif isinstance(value, Tensor):
            for candidate in dict.fromkeys([dim, 0] if value.dim() == 1 else [dim]):
                if value.dim() > candidate and value.shape[candidate] == size:
                    found[id(value)] = candidate
                    break
    return found


class Slices:
    """The samples of a batch, whatever holds them: tensors, packed sequences, lists with one entry each."""

    def __init__(
        self, batch: Any, size: int, dims: Mapping[int, int], lists: Set[int] = frozenset()
    ) -> None:
        self._batch = batch
        self._size = size
        self._dims = dims  # the dimension of the samples in each leaf, by id
        self._lists = lists  # ids of lists that have one entry for each sample
        self.carries_samples = bool(self._dims) or bool(self._lists)

    @classmethod
    def by_shape(cls, batch: Any, size: int, dim: int) -> Slices:
        """Finds the samples of a batch by the sizes of its tensors and lists."""
        dims = dims_by_size(leaves(batch), dim, size)
        return cls(batch, size, dims, _lists_of_samples(batch, size, dims))

    def sample(self, n: int) -> Any:
        """Cuts sample n out of the batch, as a batch of one."""

        def cut(value: Any) -> Any:
            if id(value) in self._lists:
                return type(value)([value[n]])
            if id(value) not in self._dims:
                return value
            if isinstance(value, PackedSequence):
                return _cut_from_packed(value, n)
            return value.narrow(self._dims[id(value)], n, 1)

        return self._mapped(cut)

    def taken_from(self, origin: Tensor) -> Any:
        """Replaces each sample n by a copy of sample origin[n]."""

        def take(value: Any) -> Any:
            if id(value) in self._lists:
                return type(value)([value[k] for k in origin.tolist()])
            return (
                _taken(value, self._dims[id(value)], origin) if id(value) in self._dims else value
            )

        return self._mapped(take)

    def sources(self) -> Tensor | None:
        """Finds for each sample the next one that differs from it; None where all are the same."""
        found = torch.full((self._size,), -1)
        numbers = torch.arange(self._size)
        for shift in range(1, self._size):
            origin = (numbers + shift) % self._size
            differs = self.differs(origin) & (found < 0)
            found = origin.where(differs, found)
            if bool((found >= 0).all()):
                return found
        return None

    def differs(self, origin: Tensor) -> Tensor:
        """Tells for each sample n whether sample origin[n] differs from it."""
        differs = torch.zeros(self._size, dtype=torch.bool)

        def compare(value: Any) -> Any:
            nonlocal differs
            if id(value) in self._lists:
                pairs = [(value[n], value[m]) for n, m in enumerate(origin.tolist())]
                differs = differs | torch.tensor([not _are_equal(a, b) for a, b in pairs])
            elif id(value) in self._dims:
                dim = self._dims[id(value)]
                t, other = value, _taken(value, dim, origin)
                if isinstance(t, PackedSequence):
                    t, other, dim = _padded(t), _padded(other), 0
                rows = (t != other).movedim(dim, 0).reshape(self._size, -1)
                differs = differs | rows.any(1).cpu()
            return value

        self._mapped(compare)
        return differs

    def _mapped(self, function: Any) -> Any:
        return map_leaves(function, self._batch, is_leaf=lambda value: id(value) in self._lists)


def _lists_of_samples(batch: Any, size: int, dims: Mapping[int, int]) -> set[int]:
    """Finds lists of one entry for each sample, such as texts, or images of different sizes.

    The tensors of the whole batch may be in a list, too. A tuple of numbers is a shape or the like.
    """
    found: set[int] = set()

    def visit(value: Any) -> bool:
        if value is batch or type(value) not in (list, tuple) or len(value) != size:
            return False
        parts = list(leaves(value))
        tensors = [part for part in parts if isinstance(part, Tensor | PackedSequence)]
        if tensors and all(id(t) in dims for t in tensors):
            return False  # each of them has all samples
        if type(value) is tuple and all(isinstance(part, int | float) for part in parts):
            return False
        found.add(id(value))
        return True

    map_leaves(lambda leaf: leaf, batch, is_leaf=visit)
    return found


def _are_equal(a: Any, b: Any) -> bool:
    pairs = list(zip(leaves([a]), leaves([b]), strict=False))
    return len(list(leaves([a]))) == len(list(leaves([b]))) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or x == y
        for x, y in pairs
    )


def _taken(t: Any, dim: int, origin: Tensor) -> Any:
    if isinstance(t, PackedSequence):
        return _taken_from_packed(t, origin)
    found = t.detach().index_select(dim, origin.to(t.device))
    return found.requires_grad_(t.requires_grad)


def _cut_from_packed(packed: PackedSequence, n: int) -> PackedSequence:
    """Packs sequence n alone."""
    order = packed.unsorted_indices
    rank = n if order is None else int(order[n])
    sizes = [size for size in packed.batch_sizes.tolist() if size > rank]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    data = packed.data[(starts + rank).to(packed.data.device)]
    first = torch.zeros(1, dtype=torch.long, device=packed.data.device)
    return PackedSequence(data, torch.ones(len(sizes), dtype=torch.long), first, first)


def _taken_from_packed(packed: PackedSequence, origin: Tensor) -> PackedSequence:
    """Replaces the steps of each sequence by those of another one, as far as both are long enough."""
    sizes = packed.batch_sizes.tolist()
    order = packed.sorted_indices
    ranks = torch.arange(sizes[0])
    sorted_to_sample = ranks if order is None else order.cpu()
    rank_of = torch.empty_like(ranks)
    rank_of[sorted_to_sample] = ranks
    other = rank_of[origin[sorted_to_sample]]  # by rank
    index, start = [], 0
    for size in sizes:
        own = ranks[:size]
        index.append(start + torch.where(other[:size] < size, other[:size], own))
        start += size
    return packed._replace(data=packed.data[torch.cat(index).to(packed.data.device)])


def _padded(packed: PackedSequence) -> Tensor:
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
