"""What a quantity is: an object that reduces the factors of each parameter and holds the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pergrad.factors import Factor

__all__ = ["Batch", "Quantity"]


@dataclass(frozen=True)
class Batch:
    """What a quantity may know of the batch: its size and the recorded parameters by name."""

    size: int
    parameters: Mapping[str, Tensor]


class Quantity(ABC):
    """Reduces per-sample gradients as they arrive in the backward pass.

    The engine calls `begin` once, `consume` for a parameter as soon as all of its uses have
    arrived (again, with the further factors, if a later backward adds to it), and `end` once.
    """

    @abstractmethod
    def begin(self, batch: Batch) -> None: ...

    @abstractmethod
    def consume(self, name: str, factors: Sequence[Factor]) -> None: ...

    @abstractmethod
    def end(self) -> None: ...
