"""Finds where a function moves the elements of a tensor, by running it on their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples

__all__ = ["layouts_after_moves"]


def layouts_after_moves(
    function: Callable[[Tensor], Sequence[Tensor]],
    t: Tensor,
    layout: Samples | Owners,
    outputs: Sequence[Tensor],
) -> list[Layout] | None:
    """Returns the layouts of `outputs = function(t)` if the function only moves elements; None otherwise.

    Run on the numbers of the elements instead of their values, it says where each one goes. That is a guess
    for any function, and a proof once these moves of `t` give the outputs.
    """
    numbers = torch.arange(t.numel(), device=t.device).view(t.shape)
    if t.dtype is not torch.int64:
        if not (numbers.to(t.dtype).long() == numbers).all():  # too many for this dtype
            return None
        numbers = numbers.to(t.dtype)
    moved = function(numbers)
    if len(moved) != len(outputs):
        return None
    shape = [-1 if d == layout.dim else 1 for d in range(t.dim())]
    owner_of_each = layout.owner_of_each(t.device).view(shape).expand(t.shape).reshape(-1)
    found: list[Layout] = []
    for places, output in zip(moved, outputs, strict=True):
        if not _are_places(places, t, output):
            return None
        after = _layout_of(owner_of_each[places.long()], layout)
        if after is None:
            return None
        found.append(after)
    return found


def _are_places(found: Tensor, t: Tensor, output: Tensor) -> bool:
    """Whether the elements of an output are those of `t` with the numbers that were found."""
    if found.shape != output.shape or found.dtype != output.dtype or not found.numel():
        return False
    places = found.long()
    if not bool(((places == found) & (places >= 0) & (places < t.numel())).all()):
        return False
    return torch.equal(t.detach().reshape(-1)[places], output)


def _layout_of(owner_of_each: Tensor, before: Samples | Owners) -> Layout | None:
    """Returns the layout whose samples are those of each element; None if they vary along two dimensions."""
    for dim in range(owner_of_each.dim()):
        size = owner_of_each.shape[dim]
        along = owner_of_each.movedim(dim, 0).reshape(size, -1)
        if (along == along[:, :1]).all():
            return before.scope.owners(dim, along[:, 0].contiguous())
    return None
