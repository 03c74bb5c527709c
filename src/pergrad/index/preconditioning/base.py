"""Defines what a preconditioner is, and how its damping is given."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pergrad.errors import IndexingError

__all__ = ["Damping", "OnGradients", "OnRows", "factorized", "refuse_unfinite"]


@dataclass(frozen=True)
class Damping:
    """λ = relative · (mean size of the matrix) + ridge."""

    relative: float
    ridge: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("damping", self.relative), ("ridge", self.ridge)):
            if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
                raise IndexingError(f"{name} must be a finite number of at least 0, got {value!r}")

    def of(self, mean: float) -> float:
        return self.relative * mean + self.ridge


class OnRows(ABC):
    """Acts on the rows of one checkpoint: projected gradients, (n, k)."""

    @abstractmethod
    def applied(self, rows: Tensor) -> Tensor: ...


class OnGradients(ABC):
    """Acts on whole gradients of one checkpoint, (n, *shape) by name, before they are projected."""

    @abstractmethod
    def applied(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


def refuse_unfinite(matrix: Tensor, kind: str) -> None:
    """Refuses a matrix of all samples where some have no finite gradient."""
    if not matrix.isfinite().all():
        raise IndexingError(
            f"the gradients of some samples are not finite, and preconditioner={kind!r} adds up those of "
            "all: leave these samples out, or take 'second_moment', which does"
        )


def factorized(matrix: Tensor, damping: float, what: str) -> Tensor:
    """Returns the Cholesky factor of matrix + damping · I; refuses a singular one."""
    size = len(matrix)
    damped = matrix + damping * torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    found, failed = torch.linalg.cholesky_ex(damped)
    diagonal = found.diagonal()
    is_singular = bool(failed) or not bool(
        diagonal.min() > (size * torch.finfo(matrix.dtype).eps) ** 0.5 * diagonal.max()
    )
    if is_singular:
        raise IndexingError(
            f"{what} is singular with a damping of {damping:.3g}: pass a larger damping, such as damping=0.1"
        )
    return found
