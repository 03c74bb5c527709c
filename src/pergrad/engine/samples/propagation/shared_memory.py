"""Follows writes of data through views: whose elements a tensor has is known where its memory is."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples, Unfinished
from pergrad.engine.samples.propagation.table import Call
from pergrad.engine.samples.propagation.writing import NOBODY, after_elements, by_dimension
from pergrad.runtime import internals

__all__ = ["layout_of_base", "layout_of_view"]


def layout_of_base(base: Tensor, before: Layout, view: Tensor, layout: Layout) -> Layout:
    """Returns the layout of a tensor once samples, or others than before, are in a view of it."""
    if not isinstance(layout, Samples | Owners) or _is_in_line(base, before, view, layout):
        return before
    with internals.outside_of_trace():
        memory = _memory(base)
        _at(memory, base, view).copy_(_owners(view, layout))
        written = _at(memory, base, base).clone()
        tensors, layouts = [base, view], [before, layout]
        call = Call(
            before.scope,
            Tensor.__setitem__,
            (base, ..., view),
            {},
            [base],
            tensors,
            layouts,
            flows=False,
        )
        return after_elements(call, base, before, written, [])


def layout_of_view(base: Tensor, layout: Layout, view: Tensor, before: Layout) -> Layout:
    """Returns the layout of a view of a tensor that was written to since; `before` is that of the view."""
    if not isinstance(layout, Samples | Owners | Unfinished):
        return before
    if isinstance(layout, Unfinished) and layout.owner is None:
        return before
    if _is_in_line(base, layout, view, before):
        return before
    with internals.outside_of_trace():
        memory = _memory(base)
        _at(memory, base, base).copy_(_owners(base, layout))
        found = by_dimension(_at(memory, base, view), []) if view.dim() else None
    if found is None or bool((found[1] == NOBODY).any()):
        return before
    return layout.scope.owners(*found)


def _is_in_line(base: Tensor, of_base: Layout, view: Tensor, of_view: Layout) -> bool:
    """Whether the samples of a view are those of the tensor behind it, one by one."""
    if not isinstance(of_base, Samples) or not isinstance(of_view, Samples):
        return False
    if (of_base.pre, of_base.post) != (of_view.pre, of_view.post) or not base.is_contiguous():
        return False
    step, size = base.stride(of_base.dim), base.shape[of_base.dim]
    if (view.stride(of_view.dim), view.shape[of_view.dim]) != (step, size):
        return False
    first = view.storage_offset() - base.storage_offset()
    return (first // step) % size == 0 if step else False


def _memory(base: Tensor) -> Tensor:
    """Returns owners for the memory of a tensor, none so far."""
    spans = [(size - 1) * step for size, step in zip(base.shape, base.stride(), strict=True)]
    return torch.full((sum(spans) + 1 if prod(base.shape) else 0,), NOBODY, device=base.device)


def _at(memory: Tensor, base: Tensor, t: Tensor) -> Tensor:
    """Returns the part of the memory that a tensor, a view of `base`, is in."""
    offset = t.storage_offset() - base.storage_offset()
    return memory.as_strided(t.shape, t.stride(), offset)


def _owners(t: Tensor, layout: Samples | Owners | Unfinished) -> Tensor:
    owner = layout.owner if isinstance(layout, Unfinished) else layout.owner_of_each(t.device)
    assert owner is not None
    if not t.dim():
        return owner.reshape(())
    return owner.view([-1 if d == layout.dim else 1 for d in range(t.dim())]).expand(t.shape)
