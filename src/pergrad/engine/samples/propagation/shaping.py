"""Propagates layouts through reshapes, permutations and repetitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples, after_reshape
from pergrad.engine.samples.propagation.table import Call, moves_samples

__all__: list[str] = []


@moves_samples(
    *"""
    view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as _unsafe_view
""".split()
)
def _reshape(call: Call) -> Layout:
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if call.name in ("view_as", "reshape_as"):
        call.layout(call.argument(1, "other"))  # only its shape matters
    if not isinstance(layout, Samples | Owners):
        return layout
    return after_reshape(layout, t.shape, call.output.shape)


@moves_samples("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis")
@moves_samples("t", "T", "mT", "H", "mH", "adjoint", "transpose_copy", "permute_copy")
def _permute(call: Call) -> Layout:
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    return layout.at(_permutation(call, t.dim()).index(layout.dim))


def _permutation(call: Call, rank: int) -> list[int]:
    """Returns the input dimension of each output dimension."""
    order = list(range(rank))
    if call.name in ("T", "t", "H"):
        return order[::-1]
    if call.name in ("mT", "mH", "adjoint"):
        return [*order[:-2], order[-1], order[-2]]
    if call.name in ("permute", "permute_copy"):
        given = call.kwargs.get("dims", call.args[1:])
        dims = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
        return [d % rank for d in dims]
    if call.name in ("movedim", "moveaxis"):
        pair = call.argument(1, "source"), call.argument(2, "destination")
        source, target = ([d % rank for d in ([x] if isinstance(x, int) else x)] for x in pair)
        placed = dict(zip(target, source, strict=True))
        rest = iter(d for d in order if d not in source)
        return [placed[d] if d in placed else next(rest) for d in order]
    a = call.argument(1, "dim0", "axis0") % rank
    b = call.argument(2, "dim1", "axis1") % rank
    order[a], order[b] = order[b], order[a]
    return order


@moves_samples("repeat", "tile")
def _repeat(call: Call) -> Layout:
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    dim = call.output.dim() - t.dim() + layout.dim
    times = call.output.shape[dim] // t.shape[layout.dim]
    if isinstance(layout, Samples):
        return call.scope.samples(dim, layout.pre * times, layout.post)
    return call.scope.owners(dim, layout.owner.repeat(times))


@moves_samples("repeat_interleave")
def _repeat_interleave(call: Call) -> Layout | None:
    t, repeats = call.argument(0, "input", "self"), call.argument(1, "repeats")
    dim = call.argument(2, "dim")
    if dim is None:
        return None
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners) or dim % t.dim() != layout.dim:
        return layout
    if isinstance(layout, Samples) and isinstance(repeats, int):
        return call.scope.samples(layout.dim, layout.pre, layout.post * repeats)
    owner = layout.owner_of_each(t.device)
    if isinstance(repeats, Tensor):
        call.layout(repeats)  # its values decide
        call.reads_values = True
    return call.scope.owners(layout.dim, torch.repeat_interleave(owner, repeats))


@moves_samples("flip", "fliplr", "flipud", "roll")
def _reorder(call: Call) -> Layout:
    """Reorders the owners like the rows; along other dimensions they stay."""
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    if call.name == "roll" and call.argument(2, "dims") in (None, ()) and t.dim() > 1:
        return call.mixed()  # it rolls the flattened tensor
    if layout.dim not in _moved_dims(call, t.dim()):
        return layout
    owner = layout.owner_of_each(t.device)
    shape = [-1 if d == layout.dim else 1 for d in range(t.dim())]
    options = {k: v for k, v in call.kwargs.items() if not isinstance(v, Tensor)}
    moved = call.func(owner.view(shape), *call.args[1:], **options)
    return call.scope.owners(layout.dim, moved.flatten())


def _moved_dims(call: Call, rank: int) -> tuple[int, ...]:
    """Lists the dimensions whose rows `flip` or `roll` moves."""
    if call.name in ("fliplr", "flipud"):
        return (1,) if call.name == "fliplr" else (0,)
    dims = call.argument(*((2, "dims") if call.name == "roll" else (1, "dims")))
    if call.name == "flip" and isinstance(dims, int):  # t.flip(0, 1)
        dims = [d for d in call.args[1:] if isinstance(d, int)]
    given = () if dims is None else (dims,) if isinstance(dims, int) else dims
    return tuple(d % rank for d in given) or (0,)  # a vector is rolled without dims


@moves_samples("as_strided", by_value=True)
def _as_strided(call: Call) -> Layout:
    """Reads the owners of the elements in memory through the new strides."""
    t, out = call.argument(0, "input", "self"), call.output
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    owner = layout.owner_of_each(t.device)
    memory = torch.full((t.untyped_storage().nbytes() // t.element_size(),), -1, device=t.device)
    sizes = [-1 if d == layout.dim else 1 for d in range(t.dim())]
    memory.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(
        owner.view(sizes).expand(t.shape)
    )
    seen = memory.as_strided(out.shape, out.stride(), out.storage_offset())
    for dim in range(out.dim()):
        rows = seen.movedim(dim, 0).reshape(out.shape[dim], -1)
        if rows.numel() and bool((rows == rows[:, :1]).all()) and int(rows.min()) >= 0:
            same = torch.equal(rows[:, 0], owner)
            return layout.at(dim) if same else call.scope.owners(dim, rows[:, 0].clone())
    return call.mixed()


@moves_samples("unfold")
def _unfold(call: Call) -> Layout | None:
    """Keeps the layout: Tensor.unfold appends the window as a dimension, F.unfold keeps the batch first."""
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    if not isinstance(layout, Samples | Owners):
        return layout
    if call.output.dim() == t.dim() + 1 and call.argument(1, "dimension") % t.dim() == layout.dim:
        return call.mixed()
    return layout if layout.dim == 0 or call.output.dim() == t.dim() + 1 else None
