"""Propagates layouts through functions that join or split tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Layout, Owners, Samples, Unfinished
from pergrad.engine.samples.propagation.table import Call, moves_samples

__all__: list[str] = []


@moves_samples("cat", "concat", "concatenate")
def _cat(call: Call) -> Layout:
    parts = call.argument(0, "tensors")
    dim = call.argument(1, "dim", "axis", default=0) % call.output.dim()
    seen = [layout for _, layout in call.with_samples]
    if any(layout.dim != dim for layout in seen):
        return call.agreed(seen)
    kept = [p for p in parts if p.numel() or (p.dim() > 1 and p.shape[dim])]
    layouts = [call.layout(p) for p in kept]
    if not layouts:
        return seen[0]
    if all(isinstance(la, Samples) and la.post == 1 for la in layouts):
        return call.scope.samples(dim, call.output.shape[dim] // call.scope.count)
    device = call.output.device
    owners = [
        la.owner_of_each(device)
        if isinstance(la, Samples | Owners)
        else torch.full((p.shape[dim],), -1, device=device)
        for p, la in zip(kept, layouts, strict=True)
    ]
    if all(isinstance(la, Samples | Owners) for la in layouts):
        return call.scope.owners(dim, torch.cat(owners))
    reason = "appends rows without a sample to the sample dimension"
    if not call.flows or call.scope.count == 1 or not all(map(_is_data, kept, layouts)):
        return call.lost(reason)
    return Unfinished(call.scope, f"`{call.name}` {reason}", "cut", dim, torch.cat(owners))


def _is_data(t: Tensor, layout: Layout) -> bool:
    """Whether a part has samples, or is constant and needs no gradient."""
    return isinstance(layout, Samples | Owners) or (
        isinstance(layout, Constant) and not t.requires_grad
    )


@moves_samples("stack")
def _stack(call: Call) -> Layout:
    dim = call.argument(1, "dim", default=0) % call.output.dim()
    single = _single_owners(call)
    if single is not None:
        return call.scope.owners(dim, single)
    return call.agreed([la.at(la.dim + (dim <= la.dim)) for _, la in call.with_samples])


def _single_owners(call: Call) -> Tensor | None:
    """Returns the owners of parts with one sample each, as `unbind` over the samples gives; else None."""
    layouts = [layout for _, layout in call.with_samples]
    if len(layouts) != len(call.tensors) or not all(isinstance(la, Owners) for la in layouts):
        return None
    owners = [la.owner for la in layouts if isinstance(la, Owners) and len(la.owner)]
    if len(owners) != len(layouts) or len({int(o[0]) for o in owners}) == 1:
        return None
    if not all(bool((owner == owner[0]).all()) for owner in owners):
        return None
    return torch.stack([owner[0] for owner in owners])


@moves_samples("split", "split_with_sizes", "chunk", "tensor_split")
@moves_samples("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def _split(call: Call) -> Layout | Sequence[Layout]:
    t = call.argument(0, "tensor", "input", "self")
    layout = call.layout(t)
    dim = call.argument(2, "dim", default=0) % t.dim()
    if not isinstance(layout, Samples | Owners) or dim != layout.dim:
        return layout
    owner = layout.owner_of_each(t.device)
    ends = list(accumulate(part.shape[dim] for part in call.outputs))
    starts = [0, *ends[:-1]]
    return [call.scope.owners(dim, owner[a:b]) for a, b in zip(starts, ends, strict=True)]


@moves_samples("unbind", "iter")
def _unbind(call: Call) -> Layout | Sequence[Layout]:
    t = call.argument(0, "input", "self")
    layout = call.layout(t)
    dim = call.argument(1, "dim", default=0) % t.dim()
    if not isinstance(layout, Samples | Owners):
        return layout
    if dim == layout.dim:
        return [call.after_select(part, layout, k) for k, part in enumerate(call.outputs)]
    return layout.at(layout.dim - (dim < layout.dim))


@moves_samples("_pack_padded_sequence")
def _pack(call: Call) -> Sequence[Layout]:
    """Returns the owners of a packed sequence's rows: each step has a row for every unfinished sequence."""
    t = call.args[0]
    layout, constant = call.layout(t), call.scope.constant()
    if not isinstance(layout, Samples | Owners):
        return [constant] * len(call.outputs)
    call.layout(call.args[1])  # the lengths: those of the outputs tell the same
    owner = layout.owner_of_each(t.device)
    sizes = call.outputs[1].tolist()
    rows = torch.cat([owner[:size] for size in sizes])
    return [Owners(call.scope, 0, rows), constant]


@moves_samples("_pad_packed_sequence")
def _pad(call: Call) -> Sequence[Layout]:
    data, sizes, batch_first = call.args[:3]
    layout = call.layout(data)
    call.layout(sizes)  # its values decide
    if not isinstance(layout, Samples | Owners):
        return [layout, call.scope.constant()]
    owner = layout.owner_of_each(data.device)[: int(sizes[0])]
    return [call.scope.owners(0 if batch_first else 1, owner), call.scope.constant()]
