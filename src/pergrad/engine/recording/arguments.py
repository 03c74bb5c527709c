"""Opens arguments: pytrees, and the mappings and dataclasses in them, which pytrees take for leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pergrad.runtime import internals

__all__ = ["is_graph_batch", "leaves", "map_leaves"]


def leaves(value: Any) -> Iterator[Any]:
    """Iterates over the leaves of an argument; a packed sequence is one leaf."""
    if isinstance(value, Tensor) or _is_packed(value):
        yield value
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif is_graph_batch(value):
        yield from leaves(value.to_dict())
    elif _has_fields(value):
        for f in fields(value):
            yield from leaves(getattr(value, f.name, None))
    elif internals.pytree.tree_is_leaf(value):
        yield value
    else:  # registered by others
        for part in internals.pytree.tree_leaves(value):
            yield from leaves(part)


def map_leaves(
    function: Callable[[Any], Any], value: Any, *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Replaces each leaf of an argument by what `function` gives for it; `is_leaf` says what else is one.

    Lists, tuples and dicts are built anew; other mappings and dataclasses are copied if a part is replaced.
    """

    def ends(part: Any) -> bool:
        return _is_packed(part) or (is_leaf is not None and is_leaf(part))

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            found = {key: map_leaves(function, part, is_leaf=is_leaf) for key, part in leaf.items()}
            is_same = all(found[key] is part for key, part in leaf.items())
            return leaf if is_same else type(leaf)(found)  # type: ignore[call-arg]
        if is_graph_batch(leaf) and not ends(leaf):
            return _mapped_graphs(function, leaf)
        if _has_fields(leaf):
            changed = leaf
            for f in fields(leaf):
                part = getattr(leaf, f.name, None)
                found = map_leaves(function, part, is_leaf=is_leaf)
                if found is not part:
                    changed = copy.copy(leaf) if changed is leaf else changed
                    object.__setattr__(changed, f.name, found)  # a dataclass may be frozen
            return changed
        return function(leaf)

    return internals.pytree.tree_map(replaced, value, is_leaf=ends)


def is_graph_batch(value: Any) -> bool:
    """Whether a value is a batch of graphs, as torch_geometric makes them."""
    if not hasattr(type(value), "num_graphs") or not hasattr(value, "to_dict"):
        return False
    return isinstance(getattr(value, "batch", None), Tensor)


def _mapped_graphs(function: Callable[[Any], Any], graphs: Any) -> Any:
    """Replaces the tensors of a batch of graphs; it is copied if one is replaced."""
    changed = graphs
    for key, part in graphs.to_dict().items():
        found = map_leaves(function, part)
        if isinstance(part, Tensor) and found is not part:
            changed = copy.copy(graphs) if changed is graphs else changed
            changed[key] = found
    return changed


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
