"""Opens arguments: pytrees, and the mappings and dataclasses in them, which pytrees take for leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch.nn.utils.rnn import PackedSequence

from pergrad.runtime import internals

__all__ = ["leaves", "map_leaves"]


def leaves(value: Any) -> Iterator[Any]:
    """Iterates over the leaves of an argument; a packed sequence is one leaf."""
    for leaf in internals.pytree.tree_leaves(value, is_leaf=_is_packed):
        if isinstance(leaf, Mapping):
            yield from leaves(dict(leaf))
        elif _has_fields(leaf):
            yield from leaves([getattr(leaf, f.name, None) for f in fields(leaf)])
        else:
            yield leaf


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Replaces each leaf of an argument by what `function` gives for it.

    Lists, tuples and dicts are built anew; other mappings and dataclasses are copied if a part is replaced.
    """

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            found = {key: map_leaves(function, part) for key, part in leaf.items()}
            is_same = all(found[key] is part for key, part in leaf.items())
            return leaf if is_same else type(leaf)(found)  # type: ignore[call-arg]
        if _has_fields(leaf):
            changed = leaf
            for f in fields(leaf):
                part = getattr(leaf, f.name, None)
                found = map_leaves(function, part)
                if found is not part:
                    changed = copy.copy(leaf) if changed is leaf else changed
                    object.__setattr__(changed, f.name, found)  # a dataclass may be frozen
            return changed
        return function(leaf)

    return internals.pytree.tree_map(replaced, value, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _has_fields(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)
