"""Tags sizes that count samples, so that `zeros(B, T)` is unambiguous when B == T."""

from __future__ import annotations

from typing import Any

__all__ = ["BatchSize"]


class BatchSize(int):
    """Tags an int as the size of a sample dimension; products and exact quotients stay tagged.

    >>> isinstance(BatchSize(4) * 3, BatchSize), isinstance(BatchSize(4) + 1, BatchSize)
    (True, False)
    """

    __slots__ = ()

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        return BatchSize(product) if type(product) is int else product

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        quotient = int(self) // other
        if type(quotient) is int and quotient > 1 and quotient * other == int(self):
            return BatchSize(quotient)
        return quotient

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
