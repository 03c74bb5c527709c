"""Reads the batch off a module's arguments: its size, and where the samples are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from pergrad.engine.layouts import Owners
from pergrad.engine.tracker import Tracker
from pergrad.errors import BatchSizeError

__all__ = ["batch_size_of", "mark_inputs"]


def _leaves(
    module: nn.Module, batch_dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor | PackedSequence, int]]:
    """Every tensor among the arguments, and the dimension that its samples are expected in.

    The states of a recurrent module have theirs in the second dimension, whatever its input has.
    """
    states = (args[1:2], kwargs.get("hx")) if isinstance(module, nn.RNNBase) else ()
    state_ids = {id(t) for t in pytree.tree_leaves(states)}
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, PackedSequence))
    for leaf in leaves:
        if isinstance(leaf, Tensor | PackedSequence):
            yield leaf, 1 if id(leaf) in state_ids else batch_dim


def batch_size_of(
    module: nn.Module, batch_dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """The size that all tensors of the arguments agree on."""
    found: int | None = None
    for leaf, dim in _leaves(module, batch_dim, args, kwargs):
        if isinstance(leaf, PackedSequence):
            size = int(leaf.batch_sizes[0])
        elif leaf.dim() > dim:
            size = leaf.shape[dim]
        else:
            continue
        if size == 0:
            raise BatchSizeError(
                f"0 is not a valid batch size for Expanded Weights but got input tensor of {leaf}"
            )
        if found is not None and found != size:
            raise BatchSizeError(
                "When computing batch size, found at least one input with batch size "
                f"{found} and one with batch size {size}. Please specify it "
                "explicitly using the batch size kwarg in call_for_per_sample_grads"
            )
        found = size
    if found is None:
        raise BatchSizeError(
            "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able "
            "and so ExpandedWeights cannot compute the batch size from the inputs. Please specify "
            "it explicitly"
        )
    return found


def mark_inputs(
    module: nn.Module, tracker: Tracker, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Tell the tracker where the samples of the arguments are; the tensors that now carry a tag."""
    marked: list[Tensor] = []
    sizes: list[int] = []
    for leaf, dim in _leaves(module, tracker.batch_dim, args, kwargs):
        if tracker.knows(leaf.data if isinstance(leaf, PackedSequence) else leaf):
            continue
        if isinstance(leaf, PackedSequence):
            order = leaf.sorted_indices
            owner = tracker.scope.samples(0).owner_of_each(leaf.data.device)
            owner = owner if order is None else owner[order]
            parts = [owner[:size] for size in leaf.batch_sizes.tolist()]
            tracker.mark(leaf.data, Owners(tracker.scope, 0, torch.cat(parts)))
            marked.append(leaf.data)
        else:
            tracker.mark(leaf, tracker.by_shape(leaf, dim))
            marked.append(leaf)
            sizes += leaf.shape[dim : dim + 1]
    count = tracker.scope.count
    if sizes and count not in sizes:
        raise BatchSizeError(
            "Expected ExpandedWeights to have batch size matching input but got "
            f"input batch size of {sizes[0]} with ExpandedWeight of batch size {count}"
        )
    return marked
