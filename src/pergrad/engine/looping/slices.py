"""Chooses how to take samples out of the arguments of a loss function: by shape, or by owners of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.looping.owned_slices import OwnedSlices
from pergrad.engine.looping.slicing import Slices
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.owning import Ownership, named_leaves, ownership_in

__all__ = ["AnySlices", "exchanging", "ownership_of_batch", "slices_of"]

AnySlices: TypeAlias = Slices | OwnedSlices


def ownership_of_batch(
    loss_fn: Callable[..., Any], batch: tuple[Any, ...], options: Options
) -> Ownership | None:
    """Returns the owners of the rows of a loss function's arguments; None if each sample has one row."""
    if options.ownership is None and all(isinstance(value, Tensor) for value in batch):
        return None  # no batch of graphs; reading the names of arguments takes 0.1 ms
    return ownership_in(options.ownership, named_leaves(loss_fn, batch, {}, skipped=1))


def slices_of(
    loss_fn: Callable[..., Any], batch: tuple[Any, ...], size: int, options: Options
) -> AnySlices:
    """Returns the samples of a loss function's arguments."""
    named = named_leaves(loss_fn, batch, {}, skipped=1)
    ownership = ownership_in(options.ownership, named)
    if ownership is None:
        return Slices.by_shape(batch, size, options.batch_dim)
    return OwnedSlices(batch, named, ownership)


def exchanging(slices: AnySlices, exchanged: Tensor, sources: Tensor) -> Tensor:
    """Returns the sample that each one becomes if some are exchanged.

    They become copies of kept ones, where the next of these differs, so that nothing of them is left: a
    maximum over the batch would not change while another sample has a copy of it.
    """
    numbers = torch.arange(len(exchanged))
    kept = numbers[~exchanged]  # never empty: no round exchanges all samples
    other = kept[torch.searchsorted(kept, numbers) % len(kept)]
    return numbers.where(~exchanged, other.where(slices.differs(other), sources))
