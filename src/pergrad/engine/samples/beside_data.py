"""Finds rows of samples that are combined with data of others, as in `x + h.flip(0)`.

Nothing says whose such a row is: the term has parts of two samples. No gradient flows through the data, so
that the graph does not tell. Other values in some samples of the data do: no row of another may change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples, Scope
from pergrad.engine.samples.propagation.elementwise import ELEMENTWISE
from pergrad.engine.samples.propagation.probes.other_values import others_stay, results_for, runs
from pergrad.engine.samples.propagation.table import Call, refuse_gradients, refuse_mixed_samples
from pergrad.runtime import is_traced

__all__ = ["is_across_data", "is_beside_other_data", "refuse_across_data"]

# Functions that pick elements of their first argument: by data, they pick rows of other samples, too.
_PICKS = frozenset(
    """
    getitem index_select gather take take_along_dim masked_select repeat_interleave
    _pack_padded_sequence
    """.split()
)


def is_beside_other_data(
    call: Call, out: Tensor, layout: Layout | None, is_known: Callable[[Tensor], bool]
) -> bool:
    """Whether rows are combined with data of other samples: moved ones, or those that a weight is used on.

    The gradient of a weight has the data in it, so that both must be in the same dimension; but data that was
    moved itself is the context of the rows that it is beside. `is_known` tells data whose samples are not
    merely read off their shape. With owners that the user has given, labels of a packed sequence may be those
    of the next one's first token, which a mask leaves out.
    """
    if not isinstance(layout, Samples | Owners) or call.scope.known or is_traced(out):
        return False
    is_moved = isinstance(layout, Owners) and _has_moved(call)
    is_strict = call.is_of_weights and call.is_overruled
    if not is_moved and not is_strict:
        return False
    # Data beside rows of the same samples, such as the index of each row, is theirs.
    flowing = [la for t, la in call.with_samples if t.requires_grad] if is_moved else []
    data: dict[int, Layout] = {}
    for t, own in call.with_samples:
        if t.requires_grad or not is_known(t):
            continue
        is_like = own.size == layout.size
        is_same = any(_have_same_owners(own, la, out.device) for la in (layout, *flowing))
        if not is_same or (is_strict and call.name not in ELEMENTWISE):
            is_context = is_like and isinstance(own, Owners) and not is_moved
            data[id(t)] = layout.at(own.dim) if is_context else own
    if not data:
        return False
    if call.name in ELEMENTWISE:
        return any(
            out.dim() - t.dim() + own.dim == layout.dim and own.size == layout.size
            for t, own in call.with_samples
            if data.get(id(t)) is own
        )
    place = next(k for k, t in enumerate(call.outputs) if t is out)
    if call.name in _PICKS:
        return _picks_by_data_of_others(call, place, data)
    return any(
        len(before) != len(after) or not others_stay(before[place], after[place], layout, mask)
        for before, after, mask in runs(call, data)
    )


def is_across_data(
    call: Call,
    out: Tensor,
    layout: Layout | None,
    is_known: Callable[[Tensor], bool],
    batch_dim: int,
) -> bool:
    """Whether rows were moved to another dimension, and data of all samples beside them was not.

    In `x + h.transpose(0, 1)`, with as many positions as samples, position n of the data is beside row n; so
    it is once both are flat. Data that all samples share, as a mask, would be the same for all rows.
    """
    if not isinstance(layout, Samples | Owners) or call.scope.known or is_traced(out):
        return False
    if layout.dim == batch_dim and (isinstance(layout, Owners) or layout.pre == 1):
        return False
    place = next(k for k, t in enumerate(call.outputs) if t is out)
    for t, own in call.with_samples:
        is_in_order = isinstance(own, Samples) and own.dim == batch_dim and own.pre == 1
        if t.requires_grad or not is_in_order or not is_known(t):
            continue
        for dim in range(t.dim()):
            at = layout.at(dim)
            if at == own or t.shape[dim] != layout.size or layout.size < 2:
                continue
            changes = [
                (before[place], after[place], mask)
                for before, after, mask in runs(call, {id(t): at})
                if after and not torch.equal(before[place], after[place])
            ]
            if changes and all(others_stay(a, b, layout, mask) for a, b, mask in changes):
                return True
    return False


def refuse_across_data(call: Call, out: Tensor) -> None:
    """Makes a gradient an error, unless losses of each sample, (B,), tell whose the rows are."""
    call.reads_values = True  # a cached answer would have no hook
    refuse_gradients(out, functools.partial(_refuse_across, call.scope, call.name))


def _refuse_across(scope: Scope, name: str, gradient: Tensor) -> None:
    """Raises an error if a gradient arrives and no losses have told; a backward hook."""
    if not scope.has_losses and not scope.is_pulling_back:
        refuse_mixed_samples(f"`{name}` combines rows of samples with data of others", gradient)


def _has_moved(call: Call) -> bool:
    """Whether an argument that a gradient flows through has its rows in another order than the samples."""
    return any(
        isinstance(la, Owners) and (t.requires_grad or call.is_of_weights)
        for t, la in call.with_samples
    )


def _have_same_owners(a: Samples | Owners, b: Samples | Owners, device: torch.device) -> bool:
    of_a, of_b = a.owner_of_each(device), b.owner_of_each(device)
    if isinstance(b, Owners) and b.is_one:
        return bool((of_a == of_b[0]).all())
    return torch.equal(of_a, of_b)


def _picks_by_data_of_others(call: Call, place: int, data: Mapping[int, Layout]) -> bool:
    """Whether other data picks other elements of the same rows.

    Run on the owners of its first argument instead of its values, the function says whose rows it picks.
    """
    t: Tensor = call.args[0]
    own = call.layout(t)
    if not isinstance(own, Samples | Owners):
        return True
    shape = [-1 if d == own.dim else 1 for d in range(t.dim())]
    owners = own.owner_of_each(t.device).view(shape).expand(t.shape)
    picked = results_for(call, None, data, {id(t): owners})[place]
    for before, after, mask in runs(call, data):
        if not after or after[place].shape != before[place].shape:
            continue  # it picks other rows
        again = results_for(call, mask, data, {id(t): owners})[place]
        is_same_row = (picked == again) & ~mask.to(t.device)[picked]
        if not torch.equal(before[place][is_same_row], after[place][is_same_row]):
            return True
    return False
