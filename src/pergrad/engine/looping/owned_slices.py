"""Takes samples of several rows out of a batch, by the owners of the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pergrad.engine.recording.arguments import is_graph_batch, map_leaves
from pergrad.engine.recording.owning import NODE_NUMBERS, Named, Ownership, Place

__all__ = ["OwnedSlices"]


class OwnedSlices:
    """The samples of a batch whose rows have owners; as `Slices`, and the number of rows stays."""

    def __init__(self, batch: Any, named: list[Named], ownership: Ownership) -> None:
        self._batch = batch
        self._own = ownership
        self._names = {id(t): names for names, t, _ in named if isinstance(t, Tensor)}
        self._places: dict[int, Place] = {}
        self._entries: dict[int, int] = {}  # the samples of entries of lists
        for names, t, entry in named:
            place = ownership.place_of(names, t, entry) if isinstance(t, Tensor) else None
            if place is not None:
                self._places[id(t)] = place
                ids = place[1]
                if entry is not None and ids is not None and len(ids) and ids.stride(0) == 0:
                    self._entries[id(t)] = int(ids[0])
        self._vectors = [ids.cpu() for ids in ownership.vectors.values() if ids is not None]
        self.carries_samples = bool(self._places)

    def sample(self, n: int) -> Any:
        """Cuts the rows of sample n out of the batch; numbers of nodes count from its first row."""

        def cut(value: Any) -> Any:
            if self._is_list(value):
                return type(value)([t for t in value if self._entries[id(t)] == n])
            if is_graph_batch(value):
                return type(value).from_data_list([value.get_example(n)])
            if not isinstance(value, Tensor):
                return value
            if id(value) in self._places:
                dim, ids = self._places[id(value)]
                if ids is None:
                    return value.narrow(dim, n, 1)
                return value.index_select(dim, _rows(ids, n).to(value.device))
            if self._own.is_ids(value):
                return value.new_zeros(int((value == n).sum()))
            if NODE_NUMBERS in self._names.get(id(value), ()):
                return self._edges_of(value, n)
            return self._block_of(value, n)

        return map_leaves(
            cut, self._batch, is_leaf=lambda part: is_graph_batch(part) or self._is_list(part)
        )

    def _is_list(self, value: Any) -> bool:
        """Whether a list has entries of single samples."""
        is_list = isinstance(value, list | tuple) and bool(value)
        return is_list and all(id(t) in self._entries for t in value)

    def _edges_of(self, edges: Tensor, n: int) -> Tensor:
        """Cuts the edges between nodes of sample n, and numbers the nodes anew."""
        for ids in self._vectors:
            nodes = ids.to(edges.device)
            if edges.numel() and int(edges.max()) >= len(nodes):
                continue
            number = torch.cumsum(nodes == n, 0) - 1
            return number[edges[:, nodes[edges[0]] == n]]
        return edges

    def _block_of(self, shared: Tensor, n: int) -> Tensor:
        """Cuts the block of sample n out of a mask over pairs of rows."""
        for ids in self._vectors:
            dims = [d for d, size in enumerate(shared.shape) if size == len(ids)]
            if len(dims) > 1:
                for d in dims:
                    shared = shared.index_select(d, _rows(ids, n).to(shared.device))
                break
        return shared

    def taken_from(self, origin: Tensor) -> Any:
        """Replaces the rows of each sample n by those of sample origin[n], or B + n: its own, reversed."""

        def take(value: Any) -> Any:
            if id(value) not in self._places:
                return value
            dim, ids = self._places[id(value)]
            found = value.detach().index_select(dim, self._order(ids, origin).to(value.device))
            return found.requires_grad_(value.requires_grad)

        return map_leaves(take, self._batch)

    def _order(self, ids: Tensor | None, origin: Tensor) -> Tensor:
        if ids is not None and len(ids) > 1 and ids.stride(0) == 0:  # an entry of a list
            n, rows = int(ids[0]), torch.arange(len(ids))
            return rows if int(origin[n]) == n else rows.flip(0)
        if ids is None:
            numbers = torch.arange(self._own.count)
            return numbers.where(origin >= self._own.count, origin)
        order = torch.arange(len(ids))
        for n, m in enumerate(origin.tolist()):
            own = _rows(ids, n)
            order[own] = own.flip(0) if m >= self._own.count else _rows(ids, m)
        return order

    def sources(self) -> Tensor | None:
        """Finds for each sample another of as many rows that differs, or its own rows reversed.

        A sample that has neither stays; None if all do.
        """
        count, numbers = self._own.count, torch.arange(self._own.count)
        found = numbers.clone()
        for shift in range(1, count):
            origin = ((numbers + shift) % count).where(found == numbers, numbers)
            found = origin.where(self.differs(origin), found)
        reversed_rows = numbers + count
        found = reversed_rows.where(self.differs(reversed_rows) & (found == numbers), found)
        return None if torch.equal(found, numbers) else found

    def differs(self, origin: Tensor) -> Tensor:
        """Tells for each sample n whether sample origin[n] has as many rows, and others."""
        count, numbers = self._own.count, torch.arange(self._own.count)
        sizes = torch.stack([torch.bincount(ids, minlength=count) for ids in self._vectors], 1)
        has_as_many = (sizes[origin % count] == sizes).all(1)
        origin = origin.where(has_as_many | (origin >= count), numbers)
        differs = torch.zeros(count, dtype=torch.bool)

        def compare(value: Any) -> Any:
            if id(value) in self._places:
                dim, ids = self._places[id(value)]
                other = value.index_select(dim, self._order(ids, origin).to(value.device))
                rows = (value != other).movedim(dim, 0).reshape(value.shape[dim], -1).any(1).cpu()
                owner = torch.arange(len(rows)) if ids is None else ids.cpu()
                differs[owner[rows]] = True
            return value

        map_leaves(compare, self._batch)
        return differs


def _rows(ids: Tensor, n: int) -> Tensor:
    return (ids.cpu() == n).nonzero().flatten()
