"""Holds the weights of samples in a sum, and what every parameter of a model asks about them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

__all__ = ["SampleWeights"]


class SampleWeights:
    """Weights of the samples, (n,); casts and looks at them once for all parameters."""

    @classmethod
    def of(cls, weights: Tensor | SampleWeights) -> SampleWeights:
        """Returns weights that were looked at already as they are."""
        return weights if isinstance(weights, SampleWeights) else cls(weights)

    def __init__(self, values: Tensor, *, drops_any: bool | None = None) -> None:
        self.values = values
        self._cast: dict[torch.dtype, Tensor] = {values.dtype: values}
        if drops_any is not None:  # the caller knows
            self.drops_any = drops_any

    @cached_property
    def drops_any(self) -> bool:
        """Whether a sample has the weight zero; it adds nothing then, not even a NaN."""
        return not bool((self.values != 0).all())

    def to(self, dtype: torch.dtype) -> Tensor:
        """Returns the weights in another dtype."""
        found = self._cast.get(dtype)
        if found is None:
            found = self._cast[dtype] = self.values.to(dtype)
        return found

    def over(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weights in a shape that broadcasts over x, (n, ...)."""
        found = self.values if dtype is None else self.to(dtype)
        return found.view(-1, *[1] * (x.dim() - 1))
