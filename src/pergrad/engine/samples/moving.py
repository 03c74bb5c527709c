"""Finds where a function moves the elements of a tensor, by running it on their numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples

__all__ = ["layout_after_moves"]


def layout_after_moves(
    function: Callable[[Tensor], Tensor], t: Tensor, layout: Samples | Owners, output: Tensor
) -> Layout | None:
    """Returns the layout of `output = function(t)` if the function only moves elements; None otherwise.

    Run on the numbers of the elements instead of their values, it says where each one goes. That is a guess
    for any function, and a proof once these moves of `t` give `output`.
    """
    numbers = torch.arange(t.numel(), device=t.device).view(t.shape)
    if t.dtype is not torch.int64:
        if not (numbers.to(t.dtype).long() == numbers).all():  # too many for this dtype
            return None
        numbers = numbers.to(t.dtype)
    found = function(numbers)
    if found.shape != output.shape or found.dtype != output.dtype or not found.numel():
        return None
    places = found.long()
    if not bool(((places == found) & (places >= 0) & (places < t.numel())).all()):
        return None
    if not torch.equal(t.detach().reshape(-1)[places], output):
        return None
    shape = [-1 if d == layout.dim else 1 for d in range(t.dim())]
    owner_of_each = layout.owner_of_each(t.device).view(shape).expand(t.shape).reshape(-1)
    return _layout_of(owner_of_each[places], layout)


def _layout_of(owner_of_each: Tensor, before: Samples | Owners) -> Layout | None:
    """Returns the layout whose samples are those of each element; None if they vary along two dimensions."""
    for dim in range(owner_of_each.dim()):
        along = owner_of_each.movedim(dim, 0).flatten(1)  # (size of the dimension, all others)
        if (along == along[:, :1]).all():
            return before.scope.owners(dim, along[:, 0].contiguous())
    return None
