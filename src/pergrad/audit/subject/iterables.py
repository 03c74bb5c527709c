"""Reads an iterable data set once, in order, into a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pergrad.audit.subject.places import told
from pergrad.errors import AuditError

__all__ = ["listed"]

_MOST = 10_000_000  # items; an endless data set would fill the memory


def listed(dataset: Iterable[Any], say: Callable[[str], None]) -> list[Any]:
    """Returns the items in order; an audit that resumes reads them again from the start.

    >>> listed(iter("abc"), print)
    data: 3 items of str_ascii_iterator read once, in order, and kept in memory
    ['a', 'b', 'c']
    """
    if not hasattr(dataset, "__iter__"):
        raise AuditError(
            f"the data set must have items by index, or be iterable; {type(dataset).__name__} is neither"
        )
    items: list[Any] = []
    try:
        for item in dataset:
            items.append(item)
            if len(items) > _MOST:
                raise AuditError(
                    f"the data set has given {_MOST:,} items and more: is it endless? Pass a part of it"
                )
    except AuditError:
        raise
    except Exception as error:
        raise AuditError(
            f"the data set failed after {len(items):,} items: {told(error)}"
        ) from error
    kind = type(dataset).__name__
    say(f"data: {len(items):,} items of {kind} read once, in order, and kept in memory")
    return items
