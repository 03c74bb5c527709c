"""Copies, compares and searches nested containers, without looking at the values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from pergrad.runtime import is_traced

__all__ = ["ATOMS", "holds_traced", "is_same", "owned_copy", "skeleton", "tensors_in"]

# Kinds of values that hold nothing, and are compared by value.
ATOMS = (
    *(str, int, float, bool, NoneType, bytes, complex, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


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
