"""Makes signatures of calls: cache keys with everything that a cached value may depend on.

Models make the same calls in every step. A signature has the function, the batch size, a description of
every tensor (its shape, its dtype and what the cache adds) and the plain arguments. It holds no tensor and
nothing that belongs to one step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pergrad.engine.samples.sizes import BatchSize

__all__ = [
    "PLAIN",
    "Signature",
    "describe",
    "describe_all",
    "describe_hashable",
    "signature_of_call",
]

Signature: TypeAlias = tuple[Hashable, ...]

# Types whose values are their own description. Not bool: True == 1, but `sum(0, True)` is not `sum(0, 1)`.
PLAIN: frozenset[type] = frozenset(
    [int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout]
)


_ENDS = frozenset([int, type(None)])  # of most slices

Describe: TypeAlias = Callable[[Any, list[Any]], bool]  # a function such as `describe`


def describe(value: Any, parts: list[Any]) -> bool:
    """Adds the description of a plain argument to `parts`; returns False if it has none."""
    kind = type(value)
    if kind in PLAIN:
        parts.append(value)
    elif kind is bool or kind is BatchSize:
        parts += kind, value
    elif kind is slice:
        start, stop, step = value.start, value.stop, value.step
        parts += slice, start, stop, step
        if type(start) in _ENDS and type(stop) in _ENDS and type(step) in _ENDS:
            return True
        return all(end is None or isinstance(end, int) for end in (start, stop, step))
    elif value is Ellipsis:
        parts.append(value)
    else:
        return False
    return True


def describe_hashable(value: Any, parts: list[Any]) -> bool:
    """Adds the type of a value and the value itself to `parts`; returns False if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return False
    parts += type(value), value
    return True


def describe_all(
    values: Iterable[Any], parts: list[Any], describe_tensor: Describe, describe_other: Describe
) -> bool:
    """Adds the descriptions of values, also in lists and tuples, to `parts`; returns False if one has none.

    `Tracker.read` repeats this code, since it reads more from the arguments in the same pass.
    """
    for value in values:
        if isinstance(value, Tensor):
            has_description = describe_tensor(value, parts)
        elif isinstance(value, list | tuple):
            parts += type(value), len(value)
            has_description = describe_all(value, parts, describe_tensor, describe_other)
        else:
            has_description = describe_other(value, parts)
        if not has_description:
            return False
    return True


def signature_of_call(
    func: Callable[..., Any],
    count: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    describe_tensor: Describe,
    describe_other: Describe,
) -> Signature | None:
    """Returns the signature of a call on `count` samples; None if an argument has no description."""
    parts: list[Any] = [count]
    has_signature = describe_hashable(func, parts)
    has_signature = has_signature and describe_all(args, parts, describe_tensor, describe_other)
    parts += dict, *kwargs
    if has_signature and describe_all(kwargs.values(), parts, describe_tensor, describe_other):
        return tuple(parts)
    return None
