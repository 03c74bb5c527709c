"""Says which sample each row of the arguments belongs to, where samples have several rows: `owners=`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.recording.arguments import is_graph_batch
from pergrad.errors import BatchSizeError

__all__ = [
    "NODE_NUMBERS",
    "Named",
    "OwnersOption",
    "Ownership",
    "Place",
    "named_leaves",
    "ownership_in",
    "ownership_of",
    "ownership_of_graphs",
]

Ids: TypeAlias = Tensor | Sequence[int]
OwnersOption: TypeAlias = Ids | Sequence[Ids | None] | Mapping[str | int, Ids | None]
Place: TypeAlias = tuple[
    int, Tensor | None
]  # the dimension of the samples, and ids unless one row each
# The names of a leaf: of its argument, of its keys; in a list also its position and the list's length.
Named: TypeAlias = tuple[tuple[str | int, ...], Any, tuple[int, int] | None]

# An argument of this name has the numbers of nodes: rows of another argument.
NODE_NUMBERS = "edge_index"


@dataclass(frozen=True, eq=False)
class Ownership:
    """Ids of the rows of arguments: one vector for all, or one for each name of an argument."""

    count: int
    vectors: Mapping[str | int, Tensor | None]  # by name or position; "" for arguments of any name

    def place_of(
        self, names: Sequence[str | int], t: Tensor, entry: tuple[int, int] | None = None
    ) -> Place | None:
        """Returns where the samples of an argument are; None if all samples share it.

        An entry of a list of one tensor for each id, such as images of different sizes, is of one sample.
        """
        for name in names:
            if name in self.vectors and name != "":
                ids = self.vectors[name]
                if ids is not None and entry is not None and entry[1] == len(ids):
                    return 0, ids[entry[0]].expand(len(t))
                return None if ids is None else (self._dim_of(ids, t, name), ids)
        if not t.dim() or self.is_ids(t) or NODE_NUMBERS in names:
            return None
        lengths = {len(ids): ids for ids in self.vectors.values() if ids is not None}
        if entry is not None and entry[1] in lengths:
            return 0, lengths[entry[1]][entry[0]].expand(len(t))
        if t.shape[0] in lengths:
            return 0, lengths[t.shape[0]]
        if t.shape[0] == self.count:
            return 0, None
        dims = [d for d, size in enumerate(t.shape) if size in lengths]
        return (dims[0], lengths[t.shape[dims[0]]]) if len(dims) == 1 else None

    def is_ids(self, t: Tensor) -> bool:
        """Whether a tensor holds the ids themselves."""
        if t.is_floating_point() or t.is_complex() or t.dim() != 1:
            return False
        return any(
            ids is t or (len(ids) == len(t) and torch.equal(ids, t.to(ids)))
            for ids in self.vectors.values()
            if ids is not None
        )

    def layout_of_rows(self, t: Tensor) -> Place | None:
        """Returns where the samples of a result are, by its shape; None if it cannot be told."""
        for d, size in enumerate(t.shape):
            if size == self.count:
                return d, None
            for ids in self.vectors.values():
                if ids is not None and len(ids) == size:
                    return d, ids.to(t.device)
        return None

    def ids_of_losses(self, losses: Tensor) -> Tensor | None:
        """Returns the ids of losses that are given for each row; None for one loss for each sample."""
        if losses.dim() != 1 or len(losses) == self.count:
            return None
        for ids in self.vectors.values():
            if ids is not None and len(ids) == len(losses):
                return ids.to(losses.device)
        return None

    def summed(self, losses: Tensor) -> Tensor:
        """Sums the losses of the rows of each sample; leaves (B,) losses and scalars as they are."""
        ids = self.ids_of_losses(losses)
        if ids is None:
            return losses
        return losses.new_zeros(self.count).index_add(0, ids, losses)

    def check_used(self, named: Sequence[Named]) -> None:
        """Raises an error if a vector of ids fits none of the arguments."""
        tensors = [(entry, t) for _, t, entry in named if isinstance(t, Tensor)]
        for name, ids in self.vectors.items():
            if ids is None:
                continue
            if name == "" and not any(
                len(ids) in (*t.shape, *(entry or ())[1:]) for entry, t in tensors
            ):
                shapes = [tuple(t.shape) for _, t in tensors]
                raise BatchSizeError(
                    f"owners has {len(ids)} ids, but no argument has as many rows: their shapes are {shapes}"
                )

    @staticmethod
    def _dim_of(ids: Tensor, t: Tensor, name: str | int) -> int:
        for d, size in enumerate(t.shape):
            if size == len(ids):
                return d
        raise BatchSizeError(
            f"owners[{name!r}] has {len(ids)} ids, but that argument has the shape {tuple(t.shape)}: give "
            "one id for each of its rows"
        )


def _by_argument(owners: OwnersOption) -> Mapping[str | int, Any]:
    """Returns vectors of ids by the name or position of their argument; "" for one vector for all."""
    if isinstance(owners, Mapping):
        return owners
    if isinstance(owners, list | tuple):
        vectors = (list, tuple, type(None))
        if any(isinstance(v, vectors) or (isinstance(v, Tensor) and v.dim()) for v in owners):
            return dict(enumerate(owners))
    return {"": owners}


def ownership_of(owners: OwnersOption, batch_size: int | None) -> Ownership:
    """Checks ids: integers from 0 on, one for each row, and rows for every sample."""
    given = _by_argument(owners)
    vectors = {name: None if ids is None else _checked(name, ids) for name, ids in given.items()}
    known = [ids for ids in vectors.values() if ids is not None]
    if not known:
        raise BatchSizeError("owners is empty: give the ids of the rows of at least one argument")
    found = torch.cat([ids.cpu() for ids in known]).unique()
    count = int(found[-1]) + 1 if batch_size is None else batch_size
    if int(found[-1]) >= count:
        raise BatchSizeError(f"owners has the id {int(found[-1])}, but batch_size is {count}")
    if len(found) < count:
        missing = sorted({*range(count)} - {*found.tolist()})
        raise BatchSizeError(
            f"owners has no row for the samples {missing[:8]}: number the samples from 0 to B - 1, each with "
            "one row or more"
        )
    return Ownership(count, vectors)


def _checked(name: str | int, given: Any) -> Tensor:
    what = "owners" if name == "" else f"owners[{name!r}]"
    ids = given.detach() if isinstance(given, Tensor) else torch.as_tensor(given)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise BatchSizeError(f"{what} must be integers, the numbers of samples, got {ids.dtype}")
    if ids.dim() != 1 or not len(ids):
        raise BatchSizeError(
            f"{what} must be a vector with one id for each row, got the shape {tuple(ids.shape)}"
        )
    if int(ids.min()) < 0:
        raise BatchSizeError(
            f"{what} has the negative id {int(ids.min())}: samples are numbered from 0"
        )
    return ids.long().contiguous()


# -- names of arguments


def named_leaves(
    function: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    skipped: int = 0,
) -> list[Named]:
    """Lists the leaves of arguments with their names: of the argument, its position, keys and fields.

    `skipped` is the number of arguments before these, such as the model of a loss function.
    """
    found: list[Named] = []
    names = _names_of(function, len(args) + skipped)[skipped:]
    for k, value in enumerate(args):
        own = (k, names[k]) if k < len(names) else (k,)
        found += _opened(own, value)
    for key, value in kwargs.items():
        found += _opened((key,), value)
    return found


def _names_of(function: Callable[..., Any] | None, count: int) -> list[str]:
    if function is None:
        return []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds][:count]


def _opened(
    names: tuple[str | int, ...], value: Any, entry: tuple[int, int] | None = None
) -> Iterator[Named]:
    if is_graph_batch(value):
        yield names, value, entry
        for key, part in value.to_dict().items():
            yield from _opened((*names, key), part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _opened((*names, key) if isinstance(key, str) else names, part)
    elif isinstance(value, list | tuple):
        for k, part in enumerate(value):
            yield from _opened(names, part, (k, len(value)))
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _opened((*names, f.name), getattr(value, f.name, None))
    else:
        yield names, value, entry


# -- batches of graphs


def ownership_in(owners: Ownership | None, named: Sequence[Named]) -> Ownership | None:
    """Returns the ownership that was given, or that of a batch of graphs; None if there is neither."""
    return owners or ownership_of_graphs(named)


def ownership_of_graphs(named: Sequence[Named]) -> Ownership | None:
    """Reads the ids of nodes, edges and graphs off a batch of graphs; None if there is none."""
    graphs = next((leaf for _, leaf, _ in named if is_graph_batch(leaf)), None)
    if graphs is None:
        return None
    count = int(graphs.num_graphs)
    vectors: dict[str | int, Tensor | None] = {}
    for key, value in graphs.to_dict().items():
        if isinstance(value, Tensor):
            vectors[key] = _ids_of_attribute(graphs, key, value)
    for key in ("batch", "ptr", NODE_NUMBERS):
        vectors[key] = None
    return Ownership(count, vectors)


def _ids_of_attribute(graphs: Any, key: str, value: Tensor) -> Tensor | None:
    """Returns the graph of each row: by the slices that the batch was joined by, or by the row's node."""
    starts = (getattr(graphs, "_slice_dict", None) or {}).get(key)
    if starts is not None:
        sizes = torch.as_tensor(starts).diff()
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(value.device)
    if not value.dim():
        return None
    if len(value) == len(graphs.batch):
        return graphs.batch
    edges = getattr(graphs, NODE_NUMBERS, None)
    if isinstance(edges, Tensor) and len(value) == edges.shape[1]:
        return graphs.batch[edges[0]]
    if len(value) == int(graphs.num_graphs):
        return torch.arange(len(value), device=value.device)
    return None
