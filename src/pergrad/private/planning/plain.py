"""Tells numbers apart, and turns those of other packages into Python's own, which a checkpoint can hold."""

from __future__ import annotations

import numbers
from typing import Any

__all__ = ["is_integer", "is_real", "plain_number"]


def is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain_number(value: Any) -> Any:
    """Returns a real number, such as NumPy's, as int or float; all else as it is."""
    if is_integer(value):
        return int(value)
    return float(value) if is_real(value) else value
