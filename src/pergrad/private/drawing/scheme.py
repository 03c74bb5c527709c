"""Defines `Scheme`: how batches are drawn, as far as a sampler needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Sampling", "Scheme"]

Sampling: TypeAlias = Literal["poisson", "truncated", "shuffled"]


@dataclass(frozen=True)
class Scheme:
    """The part of a plan that decides which records are in which batch."""

    sampling: Sampling
    rate: float
    steps: int
    bands: int = 1
    cap: int | None = None  # truncated
    population: int | None = None
    batch_size: int | None = None  # shuffled
    delta: float | None = None

    @property
    def steps_of_a_pass(self) -> int:
        """The number of shuffled batches in which every record is once at most."""
        assert self.population is not None
        assert self.batch_size is not None
        return self.population // self.batch_size
