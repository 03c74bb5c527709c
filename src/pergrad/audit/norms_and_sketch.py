"""Norms and sketches in one pass: each piece of the gradients is made once, for both."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pergrad.factors import ByOwner, Convolution, Factor, OuterProduct, RowSum, wide
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import CountSketch, SampleGradients
from pergrad.reductions.sketches import fourier_is_cheaper
from pergrad.reductions.tiles import at_once

__all__ = ["NormsAndSketch"]

_PIECE = 4 * 2**20  # bytes; what is made of a piece stays in the cache meanwhile


@dataclass(frozen=True)
class _Entries:
    """Bucket and sign of each entry of a gradient, in the order that it is made in."""

    buckets: Tensor  # (entries,)
    signs: Tensor  # (entries,)

    @classmethod
    def of(cls, sketch: CountSketch, kernel: tuple[int, ...] | None) -> _Entries:
        """In the order of the parameter, or, for a kernel (o, c, *taps), in that of (o, *taps, c)."""

        def arranged(columns: Tensor) -> Tensor:
            return columns if kernel is None else columns.view(kernel[1], -1).T.flatten()

        buckets = sketch.row_buckets[:, None] + arranged(sketch.column_buckets)
        signs = sketch.row_signs[:, None] * arranged(sketch.column_signs)
        return cls(buckets.flatten() % sketch.size, signs.flatten())


class NormsAndSketch(Quantity):
    """What `Norms` and `Projection` give: the `squares` of norms by parameter, and the `sketch`, (n, k).

    Faster than the two on the CPU, where small gradients are made once for both, piece by piece. Large ones,
    those on a GPU, and factors that have a quicker way than by their entries, such as those of embeddings
    and wide layers, take the ways of the two.
    """

    def __init__(self, dim: int, seed: int) -> None:
        self._dim = dim
        self._seed = seed
        # Kept from batch to batch.
        self._sketches: dict[str, CountSketch] = {}
        self._entries: dict[tuple[str, bool], _Entries] = {}
        self.squares: dict[str, Tensor] = {}  # each (n,) in float64
        self.sketch = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        self.sketch = torch.zeros(batch.size, self._dim, dtype=batch.dtype, device=batch.device)
        zero = torch.zeros(batch.size, dtype=torch.float64, device=batch.device)
        self.squares = dict.fromkeys(batch.parameters, zero)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if name not in self._sketches:
            sketch = CountSketch.of(name, gradients.shape, self._dim, self._seed)
            self._sketches[name] = sketch.to(self.sketch.device)
        factor, *others = gradients.factors
        if not others and self._goes_by_entries(factor):
            self.squares[name] = self._by_pieces(name, factor)
        else:
            self.squares[name] = gradients.squared_norms()
            self.sketch += gradients.sketch(self._sketches[name])

    def end(self) -> None: ...

    def _goes_by_entries(self, factor: Factor) -> bool:
        if factor.device.type != "cpu" or _bytes_each(factor) > _PIECE:
            return False
        if isinstance(factor, RowSum | ByOwner):
            return False
        if isinstance(factor, OuterProduct):
            _, o, i = factor.shape
            return not fourier_is_cheaper(factor.positions, o, i, self._dim)
        return True

    def _by_pieces(self, name: str, factor: Factor) -> Tensor:
        """|G_n|²; the sketches are added to those of the other parameters."""
        is_last = isinstance(factor, Convolution) and factor.channels_last_is_cheaper
        if (name, is_last) not in self._entries:
            kernel = factor.shape[1:] if is_last else None
            self._entries[name, is_last] = _Entries.of(self._sketches[name], kernel)
        to = self._entries[name, is_last]
        signs = to.signs.to(wide(factor.dtype))
        squares = []
        step = at_once(_bytes_each(factor), _PIECE)
        for start in range(0, factor.shape[0], step):
            samples = slice(start, start + step)
            entries = _made(factor.part(samples), is_last)
            norms = torch.linalg.vector_norm(entries, dim=1)
            squares.append(norms.double().square())
            sketch = self.sketch[samples]
            sketch.index_add_(1, to.buckets, (entries * signs).to(sketch.dtype))
        return torch.cat(squares)


def _made(factor: Factor, is_last: bool) -> Tensor:  # (n, entries)
    """The gradients themselves."""
    dtype = wide(factor.dtype)
    if is_last:
        assert isinstance(factor, Convolution)
        return factor.channels_last().materialize(dtype).view(factor.shape[0], -1)
    return factor.materialize(dtype).reshape(factor.shape[0], -1)


def _bytes_each(factor: Factor) -> int:
    """What the gradient of one sample takes while it is made."""
    return (prod(factor.shape[1:]) + factor.scratch) * wide(factor.dtype).itemsize
