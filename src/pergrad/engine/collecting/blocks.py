"""Joins what several blocks record into one quantity: for quantities with `accumulate`."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from pergrad.errors import ScopeError
from pergrad.quantities import Quantity

__all__ = ["EarlierBlocks", "refuse_second_block"]


def refuse_second_block(quantity: Quantity) -> None:
    """Raises an error if a block has filled the quantity, and another one would replace its result."""
    if quantity.is_full and not quantity.accumulate and not quantity.spans_blocks:
        raise ScopeError(
            f"this {type(quantity).__name__} has the result of an earlier block, which would be lost: call "
            "its reset() first, make it with accumulate=True to add to it, or make a new one for each block"
        )


class EarlierBlocks:
    """Takes the results of earlier blocks out of quantities that accumulate, until the next block ends."""

    __slots__ = ("_taken",)

    def __init__(self, quantities: Iterable[Quantity]) -> None:
        self._taken = [(q, copy.copy(q)) for q in quantities if q.is_full and q.accumulate]
        for quantity, _ in self._taken:
            quantity.reset()

    def join(self) -> None:
        """Puts them in front of what the block has recorded."""
        for quantity, earlier in self._taken:
            quantity.prepend(earlier)

    def restore(self) -> None:
        """Puts them back after an error: the block has added nothing."""
        for quantity, earlier in self._taken:
            vars(quantity).update(vars(earlier))
