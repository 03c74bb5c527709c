"""Defines `Adaptive`: a bound that follows a quantile of the norms."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pergrad.errors import PrivacyError
from pergrad.private.planning.plain import is_real, plain_number

__all__ = ["Adaptive"]


@dataclass(frozen=True)
class Adaptive:
    """Moves the bound to a quantile of the samples' norms (Andrew et al., 2021).

    In each step the share of samples below the bound is released with noise, and the bound is multiplied by
    exp(-rate · (share - quantile)). The account covers this release: the gradient's noise grows for it.

    Args:
        quantile: the share of samples that should not be clipped.
        rate: how fast the bound moves.
        noise: the standard deviation of the noise on the number of samples below the bound; by default a
            twentieth of the expected batch size.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # a checkpoint holds them
            object.__setattr__(self, field.name, plain_number(getattr(self, field.name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not is_real(value) and not (field.name == "noise" and value is None):
                raise PrivacyError(
                    f"{field.name} of an adaptive bound must be a number, got {value!r}"
                )
        if not 0 <= self.quantile <= 1:
            raise PrivacyError(f"quantile must be between 0 and 1, got {self.quantile!r}")
        if not 0 < self.rate < math.inf:
            raise PrivacyError(f"the rate of a bound must be positive, got {self.rate!r}")
        if self.noise is not None and not 0 < self.noise < math.inf:
            raise PrivacyError(f"the noise of a count must be positive, got {self.noise!r}")
