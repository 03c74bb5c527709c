"""Signatures: all that the layout of a call's output may depend on, so that what repeats is looked up.

Models do the same in every step. A signature has the function, the batch size, the shape, dtype and layout
of every tensor, and the plain arguments: no tensor, and nothing of the step that it was seen in.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeAlias

import torch

from pergrad.engine.samples.sizes import BatchSize

__all__ = ["PLAIN", "Signature", "describe"]

Signature: TypeAlias = tuple[Hashable, ...]

# Values that are their own description. Not bool: True == 1, but `sum(0, True)` is not `sum(0, 1)`.
PLAIN: frozenset[type] = frozenset(
    [int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout]
)


def describe(value: Any, parts: list[Any]) -> bool:
    """Add to `parts` what tells a plain argument from others; False where that cannot be compared."""
    kind = type(value)
    if kind in PLAIN:
        parts.append(value)
    elif kind is bool or kind is BatchSize:
        parts += kind, value
    elif kind is slice:
        ends = value.start, value.stop, value.step
        parts += slice, *ends
        return all(end is None or isinstance(end, int) for end in ends)
    elif value is Ellipsis:
        parts.append(value)
    else:
        return False
    return True
