"""Norms and sketches in one pass: each piece of the gradients is made once, for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pergrad.factors import ByOwner, Convolution, Factor, OuterProduct, RowSum
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import CountSketch, SampleGradients
from pergrad.reductions.sketches import fourier_is_cheaper
from pergrad.reductions.tiles import at_once
from pergrad.runtime import wide

__all__ = ["NormsAndSketch"]

_PIECE = 4 * 2**20  # bytes; what is made of a piece stays in the cache meanwhile
_AT_ONCE = 256  # samples; larger pieces bring no speed
_MOST_KEPT = 64  # sets of small parameters, of which each has a table
_FEW = 512  # entries; smaller gradients are sketched together


@dataclass(frozen=True)
class _Map:
    """The sketch of one parameter, its columns in the order of their runs."""

    row_signs: Tensor  # (rows,)
    column_signs: Tensor  # (columns,), or (*taps, channels)
    runs: list[tuple[slice, Tensor]]  # columns, and (rows,) their first bucket in each row

    @classmethod
    def of(cls, sketch: CountSketch, shape: tuple[int, ...], dtype: torch.dtype) -> _Map:
        def arranged(columns: Tensor) -> Tensor:
            return columns.view(shape[1], -1).T.flatten() if len(shape) > 2 else columns

        buckets = arranged(sketch.column_buckets)
        runs = []
        for start in range(0, len(buckets), sketch.size):
            columns = slice(start, min(start + sketch.size, len(buckets)))
            runs.append((columns, (sketch.row_buckets + buckets[start]) % sketch.size))
        signs = arranged(sketch.column_signs).view(*shape[2:], -1)
        return cls(sketch.row_signs.to(dtype), signs.to(dtype), runs)


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
        self._maps: dict[tuple[str, torch.dtype], _Map] = {}
        self._joined: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}  # buckets and signs
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        # Of one batch. No run goes round from the last bucket to the first before the end.
        self._unfolded = torch.empty(0)  # (n, 2k - 1)
        self._norms: dict[str, Tensor] = {}  # each (n,), as they are made
        self._small: dict[str, Tensor] = {}  # each (n, entries)
        self.squares: dict[str, Tensor] = {}  # each (n,) in float64
        self.sketch = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        dtype, device = batch.dtype, batch.device
        self._unfolded = torch.zeros(batch.size, 2 * self._dim - 1, dtype=dtype, device=device)
        self._norms, self._small = {}, {}
        self._queue = batch.queue
        zero = torch.zeros(batch.size, dtype=torch.float64, device=device)
        self.squares = dict.fromkeys(batch.parameters, zero)
        self.sketch = self._unfolded[:, : self._dim]
        if not self._sketches:
            shapes = {name: p.shape for name, p in batch.parameters.items()}
            made = CountSketch.of_all(shapes, self._dim, self._seed)
            self._sketches = {name: sketch.to(device) for name, sketch in made.items()}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        factor, *others = gradients.factors
        each = _bytes_each(factor)
        if others or each > _PIECE or not self._goes_by_entries(factor):
            self.squares[name] = gradients.squared_norms()
            self.sketch += gradients.sketch(self._sketches[name])
            return
        pieces = _pieces(factor.shape[0], each)
        if prod(factor.shape[1:]) <= _FEW:
            self._defer(name, factor, pieces)
        else:
            self._norms[name] = self._by_pieces(name, factor, pieces)

    def end(self) -> None:
        self._sketch_small()
        if self._norms:
            squares = torch.stack(list(self._norms.values())).double().square_()
            self.squares.update(zip(self._norms, squares, strict=True))
        self.sketch = self.sketch.contiguous()
        self.sketch[:, :-1] += self._unfolded[:, self._dim :]
        self._unfolded, self._norms = torch.empty(0), {}

    def _goes_by_entries(self, factor: Factor) -> bool:
        if factor.device.type != "cpu" or isinstance(factor, RowSum | ByOwner):
            return False
        if isinstance(factor, OuterProduct):
            _, o, i = factor.shape
            return not fourier_is_cheaper(factor.positions, o, i, self._dim)
        return True

    def _defer(self, name: str, factor: Factor, pieces: list[slice]) -> None:
        """Defers the sketch of small gradients: one sketch costs as much as many together."""
        dtype = wide(factor.dtype)
        gradients = [factor.part(samples).materialize(dtype) for samples in pieces]
        entries = torch.cat(gradients).view(factor.shape[0], prod(factor.shape[1:]))
        self._norms[name] = torch.linalg.vector_norm(entries, dim=1)
        if not self._small:
            self._queue.put(self._sketch_small)
        self._small[name] = entries
        self._queue.hold(entries.nbytes)

    def _sketch_small(self) -> None:
        """Sketches all small gradients by one call."""
        names = tuple(self._small)
        if not names:
            return
        self._queue.release(sum([entries.nbytes for entries in self._small.values()]))
        if names not in self._joined:
            if len(self._joined) >= _MOST_KEPT:
                self._joined.clear()
            tables = [self._sketches[name].entries() for name in names]
            self._joined[names] = (
                torch.cat([buckets for buckets, _ in tables]),
                torch.cat([signs for _, signs in tables]).to(self.sketch.dtype),
            )
        buckets, signs = self._joined[names]
        entries = torch.cat(list(self._small.values()), dim=1).to(self.sketch.dtype)
        self.sketch.index_add_(1, buckets, entries.mul_(signs))
        self._small.clear()

    def _by_pieces(self, name: str, factor: Factor, pieces: list[slice]) -> Tensor:
        """|G_n|; the sketches are added to those of the other parameters."""
        dtype = wide(factor.dtype)
        if (name, dtype) not in self._maps:
            self._maps[name, dtype] = _Map.of(self._sketches[name], factor.shape[1:], dtype)
        to = self._maps[name, dtype]
        windows = [self._unfolded.unfold(1, c.stop - c.start, 1) for c, _ in to.runs]
        norms = []
        for samples in pieces:
            entries = self._signed(factor.part(samples), to, dtype)
            norms.append(torch.linalg.vector_norm(entries.flatten(1), dim=1))
            for window, (columns, first) in zip(windows, to.runs, strict=True):
                # The windows overlap, but each row's run is added to its own after the one before it.
                run = entries[:, :, columns]
                window[samples].index_add_(1, first, run.to(window.dtype))
        return torch.cat(norms)

    def _signed(self, factor: Factor, to: _Map, dtype: torch.dtype) -> Tensor:
        """The gradients themselves, (n, rows, columns), with the signs of the map, columns in its order."""
        rows, columns = len(to.row_signs), to.column_signs.numel()
        if isinstance(factor, OuterProduct):
            signed = self._times(factor.input, to.column_signs, dtype)
            return self._product(factor.grad_output, signed, to, dtype)
        if isinstance(factor, Convolution) and _goes_by_windows(factor):
            signed = self._times(factor.windows(), to.column_signs, dtype)
            signed = signed.view(len(signed), -1, columns)
            return self._product(factor.by_position(), signed, to, dtype)
        entries = factor.materialize(dtype)
        entries = entries.flatten(3).mT if entries.dim() > 3 else entries.unsqueeze(-1)
        entries = entries.view(len(entries), rows, -1, entries.shape[-1])
        signs = to.row_signs[:, None, None] * to.column_signs.view(entries.shape[2:])
        # Signed as they are put into order: one pass over all entries, not three.
        signed = torch.mul(entries, signs, out=self._held("entries", entries.shape, dtype))
        return signed.view(-1, rows, columns)

    def _times(self, x: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.mul(x, signs, out=self._held("input", x.shape, dtype))

    def _product(self, g: Tensor, x: Tensor, to: _Map, dtype: torch.dtype) -> Tensor:
        """The same of Σ_t g ⊗ x, of g (n, t, rows) and x (n, t, columns), which has its signs already."""
        n, t, rows = g.shape
        # Written here and not where fresh memory happens to lie, it takes half as long.
        g = torch.mul(g.mT, to.row_signs[:, None], out=self._held("output", (n, rows, t), dtype))
        entries = self._held("entries", (n, rows, x.shape[2]), dtype)
        return torch.mul(g, x, out=entries) if t == 1 else torch.bmm(g, x, out=entries)

    def _held(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that pieces take one after the other: to be given fresh pages takes as long as a product."""
        size = prod(shape)
        memory = self._memory.get((what, dtype))
        if memory is None or len(memory) < size:
            memory = self._memory[what, dtype] = torch.empty(size, dtype=dtype)
        return memory[:size].view(shape)


def _goes_by_windows(factor: Convolution) -> bool:
    """Whether to copy windows in the order of the map: else the gradients are put into it afterwards.

    The one copies positions by columns, at less cost, and the other rows by columns.
    """
    if factor.groups > 1 or factor.kernel[1] < factor.grad_output.shape[-1]:
        return False
    return factor.channels_last_is_cheaper or factor.positions <= 4 * factor.kernel[0]


def _pieces(samples: int, bytes_each: int) -> list[slice]:
    """Samples whose gradients are made at once."""
    step = min(at_once(bytes_each, _PIECE), _AT_ONCE)
    return [slice(start, start + step) for start in range(0, samples, step)]


def _bytes_each(factor: Factor) -> int:
    """What the gradient of one sample takes while it is made."""
    scratch = factor.scratch
    if isinstance(factor, Convolution) and _goes_by_windows(factor):
        scratch = prod(factor.kernel[1:]) * factor.positions
    return (prod(factor.shape[1:]) + scratch) * wide(factor.dtype).itemsize
