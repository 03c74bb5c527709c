"""Lazy per-sample gradients: what a rule returns and what a reduction takes in.

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


@dataclass(eq=False)  # not frozen, which takes three times as long to make; nobody changes one
class Factor(ABC):
    """The gradients of one use of a weight, one for each sample, in structured form."""

    is_by_sample: ClassVar[bool] = True  # else by rows that samples own, to be `grouped`

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(n, *weight.shape)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the gradients, unless another one is asked for."""

    @property
    def device(self) -> torch.device:
        for value in vars(self).values():
            if isinstance(value, Tensor):
                return value.device
        raise NotImplementedError(f"{type(self).__name__} holds no tensor of its own")

    @abstractmethod
    def materialize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The gradients themselves, (n, *weight.shape); summed up in `dtype` where that is given."""

    @abstractmethod
    def part(self, samples: slice, rows: slice = ALL) -> Factor:
        """Some samples, and some entries of the weight's first dimension."""

    def grouped(self, dtype: torch.dtype | None = None) -> Factor:
        """The same by samples; what has to be added up for that, in `dtype` where that is given."""
        return self

    def transposed(self) -> Factor:
        """The same gradients for the transposed matrix."""
        return Dense(self.materialize().mT)

    @property
    def scratch(self) -> int:
        """Elements a sample that `materialize` needs beside its result."""
        return 0

    @property
    def size(self) -> int:
        """Elements that the factor itself holds."""
        return sum([v.numel() for v in vars(self).values() if isinstance(v, Tensor)])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The same kind of factor with each of its tensors changed."""
        return replace(self, **{name: change(t) for name, t in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


@dataclass(eq=False)
class Dense(Factor):
    """G_n as it is.

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
