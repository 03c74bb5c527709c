"""Says how a sum over the samples came to be: by a sum or by a mean, and which factors are on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import Tensor

__all__ = ["MEAN", "SUM", "UNEVEN", "How", "Origin", "joined", "untold"]

How: TypeAlias = Literal["sum", "mean"]


@dataclass(frozen=True)
class Origin:
    """How a tensor sums over the samples; None if that cannot be told, with the reason.

    Factors on one of several terms are part of the loss, and not listed here. `why_not` also says where a
    share was found that is on each term of a sum.
    """

    how: How | None
    why_not: str = ""
    factor: float = 1.0  # numbers on all of it
    # The one among them that divides by the number of samples; 1.0 if that is ambiguous, because each sample
    # has as many positions.
    share: float | None = None
    unknown: tuple[str, ...] = ()  # factors on all of it whose values are not known
    found: tuple[float | Tensor, ...] = ()  # factors of gradient scalers and trainers, on all of it
    scalers: tuple[Tensor, ...] = ()  # those of gradient scalers, which the scaler's step will undo

    def times(self, number: float) -> Origin:
        """Returns the origin of a product with a number; a sign is part of the loss."""
        return self if abs(number) == 1 else replace(self, factor=self.factor * abs(number))

    def divided(self, number: float, why_not: str = "") -> Origin:
        """Returns the origin of a sum that was divided by the number of samples, or a multiple of it."""
        return replace(self.times(1 / number), share=1 / number, why_not=why_not or self.why_not)

    def times_unknown(self, what: str) -> Origin:
        return replace(self, unknown=(*self.unknown, what))

    def times_found(self, factor: float | Tensor, *, is_scaler: bool) -> Origin:
        """Returns the origin of a product that a gradient scaler or a trainer has made."""
        scalers = (factor,) if is_scaler and isinstance(factor, Tensor) else ()
        return replace(self, found=(*self.found, factor), scalers=(*self.scalers, *scalers))

    @property
    def has_factors(self) -> bool:
        return self.factor != 1 or bool(self.unknown or self.found)


SUM, MEAN = Origin("sum"), Origin("mean")
UNEVEN = "averages over positions of which the samples have different numbers"


def untold(reason: str) -> Origin:
    """Returns the origin of a sum over the samples whose weights cannot be told."""
    return Origin(None, reason)


def joined(origins: Sequence[Origin]) -> Origin:
    """Returns the origin of a sum of terms: all must be sums, or all means.

    A factor on some terms is part of the loss, but one over the number of samples on all of them is not.
    """
    first = origins[0]
    if len(origins) == 1:
        return first
    for origin in origins:
        if origin.how is None:
            return untold(origin.why_not)
    if any(origin.how != first.how for origin in origins):
        return untold("one term of it is a sum over the samples, and another one is a mean")
    if any(list(map(id, o.found)) != list(map(id, first.found)) for o in origins):
        return untold("a gradient scaler or a trainer multiplies only some of its terms")
    shares = [origin.share for origin in origins if origin.share is not None]
    share = None
    if len(shares) == len(origins):
        share = max((s for s in shares if s != 1), default=1.0)
    factor = 1.0 if share is None else share
    why_not = next((o.why_not for o in origins if o.why_not and o.share == share), "")
    return Origin(first.how, why_not, factor, share, found=first.found, scalers=first.scalers)
