"""Copies, compares, maps and searches nested containers, without looking at the values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pergrad.runtime import internals, is_traced

__all__ = [
    "ATOMS",
    "holds_traced",
    "is_same",
    "map_parts",
    "owned_copy",
    "parts_of",
    "refilled",
    "skeleton",
    "tensors_in",
]

# Kinds of values that hold nothing, and are compared by value.
ATOMS = (
    *(str, int, float, bool, NoneType, bytes, complex, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def map_parts(function: Callable[[Any], Any], value: Any) -> Any:
    """Replaces each leaf of a pytree by what `function` gives for it.

    Torch's own `tree_map` leaves a cycle of objects at each call, which only a garbage collector frees.

    >>> map_parts(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
    {'a': [2, 3], 'b': (4,)}
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return function(value)
    if kind is tuple or kind is list:
        return kind([map_parts(function, part) for part in value])
    if kind is dict:
        return {key: map_parts(function, part) for key, part in value.items()}
    if isinstance(value, tuple) and kind.__module__ == "torch.return_types":
        return kind([map_parts(function, part) for part in value])
    if kind is torch.Size:
        sizes = [map_parts(function, part) for part in value]
        return torch.Size(sizes) if all(isinstance(size, int) for size in sizes) else sizes
    if kind is slice:
        return slice(*[map_parts(function, part) for part in (value.start, value.stop, value.step)])
    if kind in ATOMS or internals.pytree.tree_is_leaf(value):
        return function(value)
    return internals.pytree.tree_map(function, value)  # registered by others


def parts_of(value: Any) -> list[Any]:
    """Returns the leaves of a pytree, in order.

    >>> parts_of({"a": [1, 2], "b": (3,)})
    [1, 2, 3]
    """
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    """Adds the leaves of a pytree to `found`; opens what `map_parts` opens, and builds nothing."""
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif (
        kind is tuple
        or kind is list
        or kind is torch.Size
        or (isinstance(value, tuple) and kind.__module__ == "torch.return_types")
    ):
        for part in value:
            _collect(part, found)
    elif kind is dict:
        for part in value.values():
            _collect(part, found)
    elif kind is slice:
        for part in (value.start, value.stop, value.step):
            _collect(part, found)
    elif kind in ATOMS or internals.pytree.tree_is_leaf(value):
        found.append(value)
    else:
        found += internals.pytree.tree_leaves(value)  # registered by others


def refilled(value: Any, parts: Iterable[Any]) -> Any:
    """Returns a pytree with other leaves, in the order of `parts_of`.

    >>> refilled({"a": [1, 2], "b": (3,)}, "xyz")
    {'a': ['x', 'y'], 'b': ('z',)}
    """
    left = iter(parts)
    return map_parts(lambda _: next(left), value)


def owned_copy(value: Any) -> Any:
    """Copies lists, dicts, sets, deques and tuples at all depths; other objects, tensors too, are shared."""
    kind = type(value)
    if kind in (list, set, deque) or (kind is tuple and value):
        parts = map(owned_copy, value)
        return deque(parts, value.maxlen) if kind is deque else kind(parts)
    if isinstance(value, dict):
        own = value.copy()  # keeps its kind and default
        for key, part in value.items():
            own[key] = owned_copy(part)
        return own
    return value


def is_same(a: Any, b: Any) -> bool:
    """Whether two values hold the same objects in containers of the same kinds."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, ATOMS):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_same, a.values(), b.values()))
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, set | frozenset):
        return {id(part) for part in a} == {id(part) for part in b}
    return False


def skeleton(value: Any) -> Any:
    """Replaces tensors by one mark: what is left is the same after every step if no state accumulates.

    The order of names does not count: on a GPU, parameters are reduced in the order of their launches.
    """
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, dict):
        parts = [(key, skeleton(part)) for key, part in value.items()]
        return type(value), sorted(parts, key=lambda part: str(part[0]))
    if isinstance(value, list | tuple | deque):
        if all(isinstance(part, str) for part in value):
            return type(value), sorted(value)
        return type(value), [skeleton(part) for part in value]
    if isinstance(value, set | frozenset):
        return type(value), len(value)
    return value if isinstance(value, ATOMS) else type(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterates over the tensors in containers, and in attributes of objects in them."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            yield part
        elif not isinstance(part, ATOMS) and id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, dict):
                pending += dict.values(part)  # not those of a subclass, which may load them
            elif isinstance(part, list | tuple | deque | set | frozenset):
                pending += part
            elif not isinstance(part, type):
                pending += getattr(part, "__dict__", {}).values()


def holds_traced(value: Any) -> bool:
    """Whether a tensor of a trace is anywhere in the value."""
    return any(map(is_traced, tensors_in(value)))
