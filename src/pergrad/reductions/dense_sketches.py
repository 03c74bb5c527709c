"""Multiplies gradients by dense random matrices, drawn piece by piece from hashes.

The matrix of a parameter has a row for each entry and k columns. Its numbers come from integer hashes of
(seed, parameter, piece): they are the same on every device and for every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import pi, prod
from typing import Literal

import torch
from torch import Tensor

from pergrad.factors import ALL, Factor
from pergrad.reductions.sketches import hashed_integers
from pergrad.reductions.tiles import sample_tiles
from pergrad.runtime import wide

__all__ = ["DenseSketch", "dense_sketch"]

_PIECE = 2**22  # numbers of a matrix that are drawn at once
_BITS = 48  # of a hash


@dataclass(frozen=True)
class DenseSketch:
    """R G / √k, with independent random signs or standard normal numbers R (k, entries)."""

    name: str
    shape: tuple[int, ...]
    size: int
    seed: int
    kind: Literal["rademacher", "normal"]
    device: torch.device | None = None
    kept: dict[int, Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def entries_each(self) -> int:
        """Returns the entries of the gradient that one piece covers."""
        return max(1, _PIECE // self.size)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Yields parts of start to stop, and the matrix of each, (entries, k)."""
        step = self.entries_each
        for number in range(start // step, -(-stop // step)):
            first = number * step
            some = slice(max(start, first), min(stop, first + step))
            yield some, self._piece(number)[some.start - first : some.stop - first]

    def _piece(self, number: int) -> Tensor:
        if self.kept is not None and number in self.kept:
            return self.kept[number]
        entries = min(self.entries_each, prod(self.shape) - number * self.entries_each)
        count = entries * self.size
        label = f"{self.seed}/{self.name}/{self.kind}/{number}"
        drawn = _signs if self.kind == "rademacher" else _normals
        found = drawn(label, count).view(entries, self.size) * self.size**-0.5
        found = found.to(self.device)
        if self.kept is not None:
            self.kept[number] = found
        return found


def _signs(label: str, count: int) -> Tensor:
    """Returns independent signs: each bit of a hash is one."""
    (hashed,) = hashed_integers({label: -(-count // _BITS)})
    bits = (hashed[:, None] >> torch.arange(_BITS)) & 1
    return (bits.flatten()[:count] * 2 - 1).float()


def _normals(label: str, count: int) -> Tensor:
    """Returns independent standard normal numbers, two of each hash, by Box and Muller's transform."""
    (hashed,) = hashed_integers({label: -(-count // 2)})
    half = 2 ** (_BITS // 2)
    radius = ((hashed // half + 1) / half).log().mul(-2).sqrt()
    angle = (hashed % half) / half * (2 * pi)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1).flatten()[:count].float()


def dense_sketch(factors: Sequence[Factor], sketch: DenseSketch, bound: int) -> Tensor:
    """Computes R G_n / √k of the sum of the factors, (n, k)."""
    first = factors[0]
    dtype = wide(first.dtype)
    found = torch.zeros(first.shape[0], sketch.size, dtype=dtype, device=first.device)
    columns = prod(sketch.shape[1:])
    for samples, rows, gradients in sample_tiles(factors, bound):
        flat = gradients.reshape(len(gradients), -1).to(dtype)
        start = 0 if rows == ALL else rows.start * columns
        for part, matrix in sketch.pieces(start, start + flat.shape[1]):
            found[samples] += flat[:, part.start - start : part.stop - start] @ matrix.to(dtype)
    return found
