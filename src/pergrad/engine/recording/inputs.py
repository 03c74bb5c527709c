"""Reads the batch size off a module's arguments, and which dimension has the samples."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.recording.arguments import leaves
from pergrad.engine.recording.owning import Named, Ownership
from pergrad.engine.samples.layouts import Layout, Owners
from pergrad.errors import BatchSizeError, UnsupportedFunctionError
from pergrad.runtime.containers import parts_of

__all__ = ["ONLY_TENSORS", "Input", "batch_size_of", "inputs_of", "mark_inputs", "mark_owned"]

ONLY_TENSORS = frozenset([Tensor])  # the kinds of most arguments
Input: TypeAlias = tuple[Tensor | PackedSequence, int]  # and the dimension of its samples


# Arguments of torch.nn's own modules whose samples are not in the dimension of the input's: their dimension,
# or None for arguments that all samples share.
_TARGET_AND_MEMORY: dict[str, int | None] = {
    "tgt_mask": None,
    "memory_mask": None,
    "tgt_key_padding_mask": 0,
    "memory_key_padding_mask": 0,
}
_SPECIAL_ARGUMENTS: dict[type[nn.Module], dict[str, int | None]] = {
    nn.RNNBase: {"hx": 1},
    nn.MultiheadAttention: {"attn_mask": None, "key_padding_mask": 0},
    nn.TransformerEncoderLayer: {"src_mask": None, "src_key_padding_mask": 0},
    nn.TransformerEncoder: {"mask": None, "src_key_padding_mask": 0},
    nn.TransformerDecoderLayer: _TARGET_AND_MEMORY,
    nn.TransformerDecoder: _TARGET_AND_MEMORY,
    nn.Transformer: {**_TARGET_AND_MEMORY, "src_mask": None, "src_key_padding_mask": 0},
}


def _special_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, int | None]:
    """Maps the id of each special argument to the dimension of its samples."""
    for kind, special in _SPECIAL_ARGUMENTS.items():
        if isinstance(module, kind):
            bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
            return {id(t): dim for name, dim in special.items() for t in parts_of(bound.get(name))}
    return {}


def inputs_of(
    module: nn.Module, batch_dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Input]:
    """Lists every tensor among the arguments that may carry samples, and the dimension to look in."""
    special = _special_arguments(module, args, kwargs)
    found: list[Input] = []
    given: Iterable[Any] = (*args, *kwargs.values())
    if not ONLY_TENSORS.issuperset(map(type, given)):  # mostly they are, and need no opening
        given = leaves(given)
    for leaf in given:
        if isinstance(leaf, Tensor | PackedSequence):
            if isinstance(leaf, Tensor) and leaf.is_nested:
                raise UnsupportedFunctionError(
                    "an argument is a nested tensor, whose samples have different lengths: pad it "
                    "(`to_padded_tensor`) and pass a mask, or pass its rows (`values()`) with owners="
                )
            dim = special.get(id(leaf), batch_dim)
            if dim is not None:
                found.append((leaf, dim))
    return found


def _unopened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Says which argument holds tensors as attributes, where they are not found."""
    for leaf in leaves((args, kwargs)):
        held = [k for k, v in getattr(leaf, "__dict__", {}).items() if isinstance(v, Tensor)]
        if held and not isinstance(leaf, nn.Module):
            return (
                f" (an argument is a {type(leaf).__name__}, with the tensors {', '.join(held)} as "
                "attributes: pass them as arguments of their own, in a mapping or in a dataclass)"
            )
    return ""


def batch_size_of(
    inputs: Sequence[Input],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    may_be_empty: bool = False,
) -> int:
    """Returns the size that all inputs agree on; the arguments are for the error message."""
    found: int | None = None
    for leaf, dim in inputs:
        if isinstance(leaf, PackedSequence):
            size = int(leaf.batch_sizes[0])
        elif leaf.dim() > dim:
            size = leaf.shape[dim]
        else:
            continue
        if size == 0 and not may_be_empty:
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
            f"it explicitly{_unopened(args, kwargs)}"
        )
    return found


def mark_owned(tracker: Tracker, ownership: Ownership, named: Sequence[Named]) -> list[Tensor]:
    """Tells the tracker whose rows are whose; returns the tensors that now carry a tag."""
    marked: list[Tensor] = []
    for names, t, entry in named:
        if not isinstance(t, Tensor) or tracker.knows(t) or tracker.is_own(t):
            continue
        place = ownership.place_of(names, t, entry)
        if place is None:
            layout: Layout = tracker.scope.constant()
        else:
            dim, ids = place
            layout = tracker.scope.samples(dim)
            if ids is not None:
                is_one = len(ids) > 1 and ids.stride(0) == 0  # an entry of a list
                ids = ids.to(t.device)
                layout = (
                    Owners(tracker.scope, dim, ids, True)
                    if is_one
                    else tracker.scope.owned(dim, ids)
                )
        tracker.mark(t, layout)
        marked.append(t)
    return marked


def mark_inputs(tracker: Tracker, inputs: Sequence[Input]) -> list[Tensor]:
    """Tells the tracker where the samples of the inputs are; returns the tensors that now carry a tag."""
    marked: list[Tensor] = []
    sizes: list[int] = []
    for leaf, dim in inputs:
        if isinstance(leaf, PackedSequence):
            if tracker.knows(leaf.data):
                continue
            order = leaf.sorted_indices
            owner = tracker.scope.samples(0).owner_of_each(leaf.data.device)
            owner = owner if order is None else owner[order]
            parts = [owner[:size] for size in leaf.batch_sizes.tolist()]
            tracker.mark(leaf.data, Owners(tracker.scope, 0, torch.cat(parts)))
            marked.append(leaf.data)
        elif tracker.mark_input(leaf, dim):
            marked.append(leaf)
            sizes += leaf.shape[dim : dim + 1]
    count = tracker.scope.count
    if len(set(sizes)) == 1 and count not in sizes:
        raise BatchSizeError(
            "Expected ExpandedWeights to have batch size matching input but got "
            f"input batch size of {sizes[0]} with ExpandedWeight of batch size {count}: the module's first "
            "call in the block had another batch; make it outside of the block, or pass batch_size="
        )
    return marked
