"""Defines `Factor`, a lazy per-sample gradient: rules return factors, reductions take them.

Axis letters, here and everywhere: n sample, r row of a sample, t position, i in, o out, k kernel tap.
Only `materialize()` allocates (n, *weight.shape).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

__all__ = ["ALL", "Dense", "Factor"]

ALL = slice(None)


@dataclass(eq=False)  # immutable by convention: a frozen one takes three times as long to make
class Factor(ABC):
    """Holds the per-sample gradients of one use of a weight, in structured form."""

    is_by_sample: ClassVar[bool] = True  # False: by rows that belong to samples; see `grouped`

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(n, *weight.shape)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Returns the default dtype of the gradients."""

    @property
    def device(self) -> torch.device:
        for value in vars(self).values():
            if isinstance(value, Tensor):
                return value.device
        raise NotImplementedError(f"{type(self).__name__} holds no tensor: override `device`")

    @abstractmethod
    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the gradients, (n, *weight.shape), summed in `dtype` if one is given."""

    @abstractmethod
    def part(self, samples: slice, rows: slice = ALL) -> Factor:
        """Selects some samples, and some entries of the weight's first dimension."""

    def grouped(self, dtype: torch.dtype | None = None) -> Factor:
        """Regroups the factor by sample; rows of one sample are summed in `dtype` if one is given."""
        return self

    def transposed(self) -> Factor:
        """Returns the gradients of the transposed matrix."""
        return Dense(self.materialize().mT)

    @property
    def scratch(self) -> int:
        """Counts the elements per sample that `materialize` needs beside its result."""
        return 0

    @property
    def size(self) -> int:
        """Counts the elements that the factor holds."""
        return sum([v.numel() for v in vars(self).values() if isinstance(v, Tensor)])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Returns a factor of the same kind, with `change` applied to each tensor."""
        return replace(self, **{name: change(t) for name, t in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(eq=False)
class Dense(Factor):
    """G_n, materialised.

    >>> Dense(torch.ones(2, 3)).materialize().shape
    torch.Size([2, 3])
    """

    gradients: Tensor  # (n, *weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.gradients.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.gradients.dtype

    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.gradients if dtype is None else self.gradients.to(dtype)

    def part(self, samples: slice, rows: slice = ALL) -> Dense:
        return Dense(self.gradients[samples] if rows == ALL else self.gradients[samples, rows])
