"""Propagates layouts through gathers, scatters and writes: the indices decide by value whose row is whose.

The owners of the elements are moved like the elements. The result has samples if some dimension has one owner
for each index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Layout, Owners, Samples, Scope, Unfinished
from pergrad.engine.samples.propagation.elementwise import ELEMENTWISE
from pergrad.engine.samples.propagation.indexing import Indexing, width
from pergrad.engine.samples.propagation.table import Call, handler_of, moves_samples
from pergrad.runtime import internals, is_traced
from pergrad.runtime.containers import tensors_in

__all__ = [
    "NOBODY",
    "after_elements",
    "by_dimension",
    "layout_after_unfinished",
    "layout_after_write",
]

NOBODY = -1  # the owner of an element that no sample has written
# Scatters that combine the values with what the target had before.
_COMBINING = frozenset(["scatter_add", "scatter_reduce", "index_add", "index_reduce"])
# Functions that keep rows without an owner apart from all others.
_JOINING = frozenset(["cat", "concat", "concatenate"])
_BY_ROWS = frozenset(
    "getitem view view_as reshape flatten unflatten squeeze unsqueeze narrow contiguous".split()
)


def _elements(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Returns the owners of a tensor's elements, with size 1 in all dimensions but that of the samples."""
    if not isinstance(layout, Samples | Owners):
        return torch.full([1] * rank, NOBODY, device=device)
    return layout.owner_of_each(device).view([-1 if d == layout.dim else 1 for d in range(rank)])


def by_dimension(elements: Tensor, dims: Sequence[int]) -> tuple[int, Tensor] | None:
    """Finds a dimension whose every index has one owner; returns it with the owners, or None.

    `dims` are tried first. An index without any owner has the owner `NOBODY`.
    """
    ranked = [*dims, *(d for d in range(elements.dim()) if d not in dims)]
    for dim in ranked:
        rows = elements.movedim(dim, 0).flatten(1) if elements.dim() > 1 else elements.unsqueeze(1)
        most = rows.amax(1)
        if bool(((rows == most.unsqueeze(1)) | (rows == NOBODY)).all()):
            return dim, most
    return None


def _thin(t: Tensor, dims: Sequence[int]) -> Tensor:
    """Takes one index of each of these dimensions, along which all are alike."""
    for dim in dims:
        t = t.narrow(dim, 0, 1)
    return t


@moves_samples("gather", "take_along_dim")
def _gather(call: Call) -> Layout | None:
    """Keeps the layout unless the samples are in `dim`: the other dimensions of t and index correspond."""
    t = call.argument(0, "input", "self")
    if call.name == "gather":
        dim, index = call.argument(1, "dim"), call.argument(2, "index")
    else:
        index, dim = call.argument(1, "indices"), call.argument(2, "dim")
    if dim is None:
        return None
    dim %= t.dim()
    layout, own = call.layout(t), call.layout(index)
    if not isinstance(layout, Samples | Owners):
        return own
    if layout.dim != dim:
        return layout if call.output.shape[layout.dim] == layout.size else None
    if index.dim() != t.dim() or not index.numel():
        return None
    alike = [d for d in range(t.dim()) if d != dim and index.stride(d) == 0]
    found = by_dimension(layout.owner_of_each(t.device)[_thin(index, alike).long()], [dim])
    return call.mixed() if found is None else call.scope.owners(*found)


@moves_samples("scatter", "scatter_add", "scatter_reduce", by_value=True)
@moves_samples("index_add", "index_copy", "index_fill", "index_reduce", by_value=True)
def _scatter(call: Call) -> Layout | None:
    """Gives each target the owner of the values that it gets."""
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not t.dim():
        return None
    dim = call.argument(1, "dim") % t.dim()
    index, source = call.argument(2, "index"), call.argument(3, "src", "source", "value")
    own = call.layout(source) if isinstance(source, Tensor) else call.scope.constant()
    by_rows = call.name.startswith("index")
    if not isinstance(own, Samples | Owners):
        return layout if by_rows else _same_rows(call, layout, call.layout(index))
    if own.dim != dim and isinstance(layout, Samples | Owners) and layout.dim == own.dim:
        return call.agreed([layout, own])
    if not index.numel():
        return _after_nothing(call, t, layout, dim)
    if by_rows and is_traced(index) and own.dim == dim and not _had_gradient(t, call.output):
        return _rows_in_trace(call, index, own, t.shape[dim])
    shape = list(t.shape)
    if by_rows:
        shape[dim] = index.numel()
        index = index.reshape([-1 if d == dim else 1 for d in range(t.dim())]).expand(shape)
    elif source.dim() != t.dim() or index.dim() != t.dim():
        return None
    fixed = {dim, own.dim, *([layout.dim] if isinstance(layout, Samples | Owners) else [])}
    alike = [
        d
        for d in range(t.dim())
        if d not in fixed and index.stride(d) == 0 and index.shape[d] == t.shape[d]
    ]
    index = _thin(index, alike)
    givers = _elements(own, t.dim(), t.device)
    givers = givers.narrow(own.dim, 0, index.shape[own.dim]).expand(index.shape)
    sizes = [1 if d in alike else size for d, size in enumerate(t.shape)]
    written = torch.full(sizes, NOBODY, device=t.device).scatter(dim, index, givers)
    is_last = torch.equal(written.gather(dim, index), givers)
    if not is_last:  # several samples write to one target
        return call.mixed("adds up values of several samples")
    combines = call.name in _COMBINING
    return after_elements(call, t, layout, written, [own.dim, dim], combines=combines)


def _after_nothing(call: Call, t: Tensor, layout: Layout, dim: int) -> Layout:
    """Returns the layout after a write of no rows: autograd makes it part of the graph, but no sample's."""
    if not isinstance(layout, Constant) or not call.flows:
        return layout
    owner = torch.full((t.shape[dim],), NOBODY, device=t.device)
    return Unfinished(call.scope, f"`{call.name}` writes no rows", "cut", dim, owner)


def _rows_in_trace(call: Call, index: Tensor, own: Samples | Owners, size: int) -> Layout:
    """Returns the layout of rows that those of samples are added to, by an index that a trace does not know.

    Every row must get those of one sample. The graph computes whether that is so.
    """
    call.layout(index)
    givers = own.owner_of_each(index.device)
    owner = torch.full((size,), NOBODY, device=index.device).scatter(0, index.long(), givers)
    call.scope.misplaced.append((owner[index] != givers).any() | (owner == NOBODY).any())
    return Owners(call.scope, own.dim, owner)


def _same_rows(call: Call, layout: Layout, index: Layout) -> Layout | None:
    """Returns the layout after constants were written to places that may differ between samples."""
    if isinstance(layout, Samples | Owners) or not isinstance(index, Samples | Owners):
        return layout
    return index if call.output.shape[index.dim] == index.size else None


def after_elements(
    call: Call,
    t: Tensor,
    before: Layout,
    written: Tensor,
    dims: Sequence[int],
    *,
    combines: bool = False,
) -> Layout:
    """Returns the layout of `t` after elements with the owners `written` came into it.

    `combines`: the old values are still part of the new ones. Without a gradient of their own they are data,
    and belong to whatever they are combined with.
    """
    claims = _claims(before, t, written)
    if _had_gradient(t, call.output):
        if not isinstance(before, Samples | Owners | Unfinished | Constant):
            return call.mixed("overwrites samples with others")
        meet = (written != NOBODY) & (claims != NOBODY) & (written != claims)
        if combines and bool(meet.any()):
            return call.mixed("overwrites samples with others")
    elif isinstance(before, Samples | Owners):
        found = by_dimension(torch.where(written == NOBODY, claims, written), dims)
        if found is None and not call.flows:  # data of others in part of each sample, as for CutMix
            return before if isinstance(before, Samples) else call.scope.constant()
        call.leaves_data = found is None and _has_data_left(call, t, written)
        claims = claims if found is not None else torch.full_like(claims, NOBODY)
    first = [before.dim] if isinstance(before, Samples | Owners | Unfinished) else []
    found = by_dimension(torch.where(written == NOBODY, claims, written), [*first, *dims])
    if found is None:
        return call.mixed("overwrites samples with others")
    dim, owner = found
    if bool((owner != NOBODY).all()):
        return call.scope.owners(dim, owner)
    return _unfinished(call, dim, owner)


def _has_data_left(call: Call, t: Tensor, written: Tensor) -> bool:
    """Whether a write has left values of samples, and not only what a new tensor was filled with."""
    if is_traced(t):
        return False
    call.reads_values = True
    left = t.detach()[(written == NOBODY).expand(t.shape)]
    return not bool(((left == left[:1]) | (left.isnan() & left[:1].isnan())).all())


def _claims(before: Layout, t: Tensor, written: Tensor) -> Tensor:
    """Returns the owners of the elements before a write, in the shape of `written`."""
    if isinstance(before, Unfinished):
        assert before.owner is not None
        owner = before.owner.view([-1 if d == before.dim else 1 for d in range(t.dim())])
    elif isinstance(before, Owners) and before.presumed is not None:
        known = before.owner.masked_fill(before.presumed, NOBODY)
        owner = known.view([-1 if d == before.dim else 1 for d in range(t.dim())])
    else:
        owner = _elements(before, t.dim(), t.device)
    return owner.expand(written.shape)


def _unfinished(call: Call, dim: int, owner: Tensor, reason: str | None = None) -> Layout:
    """Returns the layout of a tensor of which some rows have no owner yet.

    If row n can be sample n's, it is presumed to be: a sample that writes nothing has constant rows.
    """
    count, size = call.scope.count, len(owner)
    is_free = owner == NOBODY
    if size % count == 0:
        natural = call.scope.samples(dim, 1, size // count).owner_of_each(owner.device)
        if bool((is_free | (owner == natural)).all()):
            return Owners(call.scope, dim, natural, presumed=is_free)
    reason = reason or f"`{call.name}` writes samples into part of a constant"
    return Unfinished(call.scope, reason, "cut", dim, owner)


def _had_gradient(t: Tensor, output: Tensor) -> bool:
    """Whether a gradient flows to what the target was before it was written to, in place or not."""
    node: Any = t.grad_fn
    if node is None or output is not t:
        return t.requires_grad
    if not node.next_functions:
        return True
    return node.next_functions[0][0] is not None


def _like(t: Tensor, index: Any) -> Tensor:
    """Returns a tensor to index like `t`; of a traced one, with known indices, one without memory."""
    is_known = is_traced(t) and not any(map(is_traced, tensors_in(index)))
    return torch.empty(()).expand(t.shape) if is_known else t.detach()


@moves_samples("written")
def layout_after_write(call: Call) -> Layout:
    """Returns the layout of `t` after `t[index] = value`."""
    t, index, value = call.args[:3]
    layout = call.layout(t)
    own = call.layout(value) if isinstance(value, Tensor) else call.scope.constant()
    if not isinstance(own, Samples | Owners) or not t.numel():
        return layout
    if not value.numel():
        return _after_nothing(call, t, layout, 0)
    if any(isinstance(i, bool) for i in (index if isinstance(index, tuple) else (index,))):
        return call.mixed("indexes with Python bools")
    where = Indexing(t, index)
    region = _like(t, index)[index]
    place = region.dim() - value.dim() + own.dim  # of the value's samples in the region
    fixed = {layout.dim} if isinstance(layout, Samples | Owners | Unfinished) else set()
    alike: list[int] = []  # dimensions of t that are written as a whole, and alike for all samples
    dims: list[int] = []  # the dimension of t where the value's samples come
    first = 0
    for k, item in enumerate(where.items):
        if isinstance(item, slice):
            is_place = where.place_of_slice(k) == place
            is_whole = item.indices(t.shape[first]) == (0, t.shape[first], 1)
            is_filled = is_place and is_whole and t.shape[first] == own.size
            if is_filled and (isinstance(layout, Constant) or layout == own.at(first)):
                return own.at(first)
            dims += [first] if is_place else []
            if is_whole and not is_place and first not in fixed:
                alike.append(first)
        first += width(item)
    sizes = [1 if d in alike else size for d, size in enumerate(t.shape)]
    written = torch.full(sizes, NOBODY, device=t.device)
    items = tuple(where.items)
    givers = _elements(own, value.dim(), t.device) if value.dim() else own.owner_of_each(t.device)
    try:
        written[items] = givers
        seen = written[items]
        is_last = torch.equal(seen, givers.expand_as(seen))
    except (RuntimeError, IndexError):  # a value with more dimensions than the region
        return call.mixed("overwrites samples with others")
    if not is_last:
        return call.mixed("writes several samples to one place")
    return after_elements(call, t, layout, written, dims)


@moves_samples("index_put", "index_put_impl", by_value=True)
def _index_put(call: Call) -> Layout | None:
    t, indices, value = call.args[:3]
    is_added = call.argument(3, "accumulate", default=False)
    index = tuple(slice(None) if i is None else i for i in indices)
    inner = Call(
        call.scope,
        call.func,
        (t, index, value),
        {},
        call.outputs,
        call.tensors,
        call.layouts,
        call.flows,
    )
    for part in (t, value, *(i for i in indices if i is not None)):
        call.layout(part)
    if not is_added:
        found = layout_after_write(inner)
        call.leaves_data = inner.leaves_data
        return found
    layout, own = call.layout(t), call.layout(value)
    if not isinstance(own, Samples | Owners) or not value.numel():
        return layout
    if len(indices) != 1 or indices[0].dim() != 1 or own.dim != 0 or value.dim() != t.dim():
        return None
    rows = indices[0].nonzero().flatten() if indices[0].dtype is torch.bool else indices[0]
    owner, givers = torch.full((len(t),), NOBODY, device=t.device), own.owner_of_each(t.device)
    owner[rows] = givers
    if not torch.equal(owner[rows], givers):
        return call.mixed("adds up values of several samples")
    written = owner.view([-1] + [1] * (t.dim() - 1))
    return after_elements(call, t, layout, written, [0], combines=True)


# -- rows without an owner, which are constant


def layout_after_unfinished(call: Call) -> Layout | None:
    """Returns the layout after a function of a tensor with constant rows; None if it may mix samples.

    Constant rows may belong to any sample: to that whose rows they are combined with, or added to.
    """
    found = [k for k, la in enumerate(call.layouts) if isinstance(la, Unfinished)]
    if len(found) != 1 or not call.flows:
        return None
    t, layout = call.tensors[found[0]], call.layouts[found[0]]
    assert isinstance(layout, Unfinished)
    owner = layout.owner
    if owner is None or not t.dim() or t.shape[layout.dim] != len(owner):
        return None
    if call.name in _COMBINING and t is call.argument(3, "src", "source"):
        owner = _owners_of_targets(call, owner, layout.dim)
    elif call.name in ELEMENTWISE:
        owner = _owners_of_others(call, t, owner, layout.dim)
    elif call.name not in _JOINING and (call.name not in _BY_ROWS or t is not call.args[0]):
        return None
    handler = handler_of(call.func)
    if owner is None or handler is None:
        return None
    own = Owners(call.scope, layout.dim, owner)
    layouts = [own if k == found[0] else la for k, la in enumerate(call.layouts)]
    inner = Call(
        call.scope,
        call.func,
        call.args,
        call.kwargs,
        call.outputs,
        call.tensors,
        layouts,
        call.flows,
        call.hints,
    )
    after = handler(inner)
    call.reads_values = True
    if isinstance(after, Owners) and bool((after.owner == NOBODY).any()):
        return _unfinished(call, after.dim, after.owner, layout.reason)
    return after if isinstance(after, Samples | Owners | Unfinished) else None


def _owners_of_others(call: Call, t: Tensor, owner: Tensor, dim: int) -> Tensor | None:
    """Gives rows without an owner those of the arguments that they are combined with; None if some differ."""
    rank = call.output.dim()
    for other, layout in call.with_samples:
        if rank - other.dim() + layout.dim != rank - t.dim() + dim or layout.size != len(owner):
            return None
        given = layout.owner_of_each(owner.device)
        if not bool(((owner == NOBODY) | (owner == given)).all()):
            return None
        owner = given
    return owner


def _owners_of_targets(call: Call, owner: Tensor, dim: int) -> Tensor | None:
    """Gives rows without an owner those of other rows that are added to the same target."""
    index = call.argument(2, "index")
    if call.argument(1, "dim") % call.output.dim() != dim or not index.numel():
        return None
    rows = index.reshape(-1, 1) if index.dim() == 1 else index.movedim(dim, 0).flatten(1)
    if len(rows) != len(owner) or not bool((rows == rows[:, :1]).all()):
        return None
    to, is_free = rows[:, 0], owner == NOBODY
    targets = torch.full((call.output.shape[dim],), NOBODY, device=owner.device)
    targets[to[~is_free]] = owner[~is_free]
    return torch.where(is_free, targets[to], owner)


def _elements_in_order(scope: Scope, own: Samples | Owners, t: Tensor) -> list[int] | None:
    """Returns how many elements each sample has, if they come one sample after the other; else None."""
    if own.dim != 0 or scope.count < 2:
        return None
    if isinstance(own, Samples):
        return [t.numel() // scope.count] * scope.count if own.pre == 1 else None
    if is_traced(own.owner):
        return None
    with internals.outside_of_trace():
        owner = own.owner.cpu()
        rows = torch.bincount(owner, minlength=scope.count).tolist()
        return (
            [n * (t.numel() // len(owner)) for n in rows]
            if bool((owner.diff() >= 0).all())
            else None
        )


@moves_samples("masked_scatter", by_value=True)
def _masked_scatter(call: Call) -> Layout | None:
    t, mask, source = (call.argument(k, name) for k, name in enumerate(("input", "mask", "source")))
    layout, own = call.layout(t), call.layout(source)
    call.layout(mask)  # its values decide
    if t.shape != call.output.shape:
        return None  # it is broadcast
    if not isinstance(own, Samples | Owners):
        return layout
    places = mask.expand(t.shape)
    is_in_order = isinstance(layout, Samples) and layout.dim == 0 and layout.pre == 1
    if is_traced(places) and is_in_order:
        elements = _elements_in_order(call.scope, own, source)
        if elements is not None:  # each sample must have as many places
            each = places.reshape(len(elements), -1).sum(1)
            call.scope.misplaced.append((each != torch.tensor(elements, device=each.device)).any())
            return layout
    written = torch.full(t.shape, NOBODY, device=t.device)
    givers = _elements(own, source.dim(), t.device).expand(source.shape).flatten()
    written[places] = givers[: int(places.sum())]
    return after_elements(call, t, layout, written, [own.dim])
