"""Propagates layouts through indexing, exactly: the owners of the rows are indexed like the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples
from pergrad.engine.samples.propagation.elementwise import aligned
from pergrad.engine.samples.propagation.table import Call, moves_samples

__all__ = ["Indexing", "width"]


def _is_number(index: Any) -> bool:
    """Whether an index is a number or a scalar tensor."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8)
    return isinstance(index, int) or type(index).__name__ in ("int64", "int32")


def _is_advanced(index: Any) -> bool:
    return index is not None and not isinstance(index, slice) and not _is_number(index)


def _as_tensor(index: Any, device: torch.device) -> Tensor:
    if isinstance(index, Tensor):
        return index
    made = torch.as_tensor(index, device=device)
    return made if made.numel() else made.long()


def width(index: Any) -> int:
    """Returns how many dimensions of the tensor an index consumes."""
    if index is None:
        return 0
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.dim()
    return 0 if isinstance(index, bool) else 1


def _normalized(index: Any, rank: int) -> list[Any]:
    """Returns the index as a list, with slices for the ellipsis and for trailing dimensions."""
    items = list(index) if isinstance(index, tuple) else [index]
    free = rank - sum(width(i) for i in items if i is not Ellipsis)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), None)
    whole = [slice(None)] * free
    return [*items, *whole] if at is None else [*items[:at], *whole, *items[at + 1 :]]


class Indexing:
    """Maps the dimensions of `t` and of its index tensors to the dimensions of `t[index]`."""

    def __init__(self, t: Tensor, index: Any) -> None:
        self.items = _normalized(index, t.dim())
        # A number only removes its dimension.
        blocks = [i for i in self.items if not _is_number(i)]
        places = [k for k, i in enumerate(blocks) if _is_advanced(i)]
        self.tensors = [_as_tensor(blocks[k], t.device) for k in places]
        shapes = [(1,) if i.dtype in (torch.bool, torch.uint8) else i.shape for i in self.tensors]
        self.rank = max((len(s) for s in shapes), default=0)  # of the dimensions that they give
        together = bool(places) and places == list(range(places[0], places[-1] + 1))
        self.start = places[0] if together else 0  # the first of these in the output

    def _kept(self, k: int) -> int:
        return sum(i is None or isinstance(i, slice) for i in self.items[:k])

    def find(self, dim: int) -> tuple[int, Any, int]:
        """Finds the item that indexes dimension `dim` of t: its position, itself, and dim's offset in it."""
        first = 0
        for k, item in enumerate(self.items):
            covered = width(item)
            if first <= dim < first + covered:
                return k, item, dim - first
            first += covered
        raise IndexError(dim)

    def place_of_slice(self, k: int) -> int:
        """Returns the output dimension of the slice at position k."""
        kept = self._kept(k)
        return kept + self.rank if self.tensors and kept >= self.start else kept


@moves_samples("getitem", "index")
def _getitem(call: Call) -> Layout | None:
    t, index = call.args[:2]
    if call.name == "index":
        index = tuple(index)
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, bool) for i in items):
        if index is not True:
            return call.mixed("indexes with Python bools")
        index = None  # t[True] and t[None] both add a first dimension
    layout = call.layout(t)
    where = Indexing(t, index)
    varying = [i for i in where.tensors if isinstance(call.layout(i), Samples | Owners)]
    if not isinstance(layout, Samples | Owners) or (varying and not t.requires_grad):
        return _gathered(call, where, varying)  # without a gradient, t counts as constant
    k, item, offset = where.find(layout.dim)
    if isinstance(item, slice):
        place = where.place_of_slice(k)
        if varying:
            return _of_one(call, layout.owner_of_each(t.device)[item], varying, place)
        if call.output.shape[place] == layout.size and (item.step or 1) == 1:
            return layout.at(place)
        if _is_shared(call, t, layout.dim):
            return call.scope.constant()
        return call.scope.owners(place, layout.owner_of_each(t.device)[item])
    if _is_number(item):
        if where.tensors:
            return call.lost("selects one sample") if t.requires_grad else call.scope.constant()
        return call.after_select(call.output, layout, int(item))
    return _picked(call, where, _as_tensor(item, t.device), offset, layout)


def _of_one(call: Call, rows: Tensor, varying: Sequence[Tensor], place: int) -> Layout:
    """Returns the layout of rows of one sample that an index of that sample selects from; else mixed."""
    owners = [rows]
    for index in varying:
        layout = call.layout(index)
        assert isinstance(layout, Samples | Owners)
        owners.append(layout.owner_of_each(rows.device))
    if len(torch.cat(owners).unique()) != 1 or not len(rows):
        return call.mixed()
    return Owners(call.scope, place, rows)


def _is_shared(call: Call, t: Tensor, dim: int) -> bool:
    """Whether all samples have the same rows of `t` along `dim`, as with indices expanded to the batch.

    The values decide, since a copy to another device loses the stride of zero. If all rows are equal, a
    slice of them gives every sample the same rows.
    """
    if t.is_floating_point() or t.is_complex() or t.shape[dim] < 2:
        return False
    call.reads_values = True
    return t.stride(dim) == 0 or bool((t == t.narrow(dim, 0, 1)).all())


def _gathered(call: Call, where: Indexing, varying: Sequence[Tensor]) -> Layout | None:
    """Returns the layout of a constant indexed by tensors that differ between samples."""
    found: Layout | None = None
    for index in varying:
        layout = call.layout(index)
        assert isinstance(layout, Samples | Owners)
        if index.dtype in (torch.bool, torch.uint8):
            rows = index.nonzero()[:, layout.dim]
            here: Layout = call.scope.owners(where.start, layout.owner_of_each(index.device)[rows])
        else:
            here = layout.at(where.start + where.rank - index.dim() + layout.dim)
        if found is not None and found != here:
            return call.mixed()
        found = here
    return found if found is not None else call.scope.constant()


def _picked(
    call: Call, where: Indexing, index: Tensor, offset: int, layout: Samples | Owners
) -> Layout:
    """Returns the layout of rows selected by an index tensor: each keeps its owner."""
    owner = layout.owner_of_each(index.device)
    if index.dtype in (torch.bool, torch.uint8):
        return call.scope.owners(where.start, owner[index.nonzero()[:, offset]])
    if index.dim() == 0:
        return call.lost("selects one sample")
    picked = owner[index]
    wide = [d for d in range(index.dim()) if index.shape[d] > 1] or [index.dim() - 1]
    for d in wide:
        rows = picked.movedim(d, 0).flatten(1) if picked.dim() > 1 else picked.unsqueeze(1)
        if len(wide) == 1 or bool((rows == rows[:, :1]).all()):
            return call.scope.owners(where.start + where.rank - index.dim() + d, rows[:, 0])
    return call.mixed("selects samples along several dimensions at once")


@moves_samples("select", "narrow", "index_select", "select_copy", "narrow_copy")
def _select(call: Call) -> Layout:
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    dim = call.argument(1, "dim") % t.dim()
    if not isinstance(layout, Samples | Owners):
        index = call.argument(2, "index")
        own = call.layout(index) if isinstance(index, Tensor) else layout
        return own.at(dim) if isinstance(own, Samples | Owners) else layout
    if call.name == "select":
        if dim == layout.dim:
            return call.after_select(call.output, layout, int(call.argument(2, "index")))
        return layout.at(layout.dim - (dim < layout.dim))
    if dim != layout.dim:
        return layout
    owner = layout.owner_of_each(t.device)
    if call.name == "index_select":
        index = call.argument(2, "index")
        call.layout(index)  # its values decide
        return call.scope.owners(dim, owner[index].reshape(-1))
    start = int(call.argument(2, "start")) % max(t.shape[dim], 1)
    return call.scope.owners(dim, owner[start : start + call.output.shape[dim]])


@moves_samples("nonzero", "argwhere", "where", by_value=True)
def _nonzero(call: Call) -> Layout | None:
    """Gives each row the sample of the nonzero element that it stands for."""
    if call.name == "where" and len(call.args) + len(call.kwargs) > 1:
        return aligned(call)
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    as_tuple = len(call.outputs) == t.dim() and call.outputs[0].dim() == 1
    rows = call.outputs[layout.dim] if as_tuple else call.output[:, layout.dim]
    return call.scope.owners(0, layout.owner_of_each(t.device)[rows])


@moves_samples("masked_select", by_value=True)
def _masked_select(call: Call) -> Layout:
    t, mask = call.argument(0, "input", "self"), call.argument(1, "mask")
    shape = torch.broadcast_shapes(t.shape, mask.shape)
    found: Tensor | None = None
    for part in (t, mask):
        layout = call.layout(part)
        if isinstance(layout, Samples | Owners):
            sizes = [-1] + [1] * (part.dim() - 1 - layout.dim)
            owner = layout.owner_of_each(t.device).view(sizes).expand(shape)[mask.expand(shape)]
            if found is not None and t.requires_grad and not torch.equal(found, owner):
                return call.mixed()
            found = owner if found is None else found
    return call.scope.constant() if found is None else call.scope.owners(0, found)
