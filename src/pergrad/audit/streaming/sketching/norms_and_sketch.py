"""Computes norms and sketches in one pass: each piece of the gradients is computed once for both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from pergrad.audit.streaming.sketching.narrowing import narrowed, narrowings
from pergrad.factors import ByOwner, Convolution, Dense, Factor, OuterProduct, RowSum
from pergrad.quantities import Batch, Quantity, SampleReport
from pergrad.reductions import CountSketch, SampleGradients
from pergrad.reductions.choosing import fourier_is_cheaper
from pergrad.reductions.tiles import at_once
from pergrad.runtime import wide

__all__ = ["SKETCHES", "NormsAndSketch"]

SKETCHES = 3  # version of the maps; 1 and 2 had other columns of kernels

_PIECE = 4 * 2**20  # bytes; a piece stays in the cache until it is reduced
_AT_ONCE = 256  # samples; larger pieces are no faster
_MOST_KEPT = 64  # sets of small parameters; each has a table
_FEW = 512  # entries; smaller gradients are sketched together


@dataclass(frozen=True)
class _Map:
    """The sketch of one parameter, with columns grouped into runs of consecutive buckets."""

    row_signs: Tensor  # (rows, 1)
    column_signs: Tensor  # (columns,)
    runs: list[tuple[slice, Tensor]]  # columns, and (rows,) their first bucket in each row

    @classmethod
    def of(cls, sketch: CountSketch, dtype: torch.dtype) -> _Map:
        columns, runs = len(sketch.column_signs), []
        for start, first in zip(range(0, columns, sketch.size), sketch.runs, strict=True):
            run = slice(start, min(start + sketch.size, columns))
            runs.append((run, (sketch.row_buckets + first) % sketch.size))
        return cls(sketch.row_signs.to(dtype)[:, None], sketch.column_signs.to(dtype), runs)

    @cached_property
    def signs(self) -> Tensor:  # (rows, columns)
        return self.row_signs * self.column_signs


class NormsAndSketch(Quantity):
    """Computes `Norms` and `Projection` together: `squares` of norms by parameter, and `sketch`, (n, k).

    On the CPU it is faster than both: small gradients are computed once, in pieces. Large gradients,
    gradients on a GPU, and factors with faster reductions than over their entries, such as embeddings and
    wide layers, use the reductions of the two. Without `has_norms` it computes sketches alone.

    The map is that of `Projection`, but without norms large kernels are narrowed first.
    """

    def __init__(self, dim: int, seed: int, *, has_norms: bool = True) -> None:
        self._dim = dim
        self._seed = seed
        self._has_norms = has_norms
        # Kept from batch to batch.
        self._shapes: dict[str, Sequence[int]] = {}
        self._sketches: dict[str, CountSketch] = {}
        self._narrowings: dict[str, Tensor] = {}  # each (columns, b)
        self._maps: dict[tuple[str, torch.dtype], _Map] = {}
        self._joined: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}  # buckets and signs
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        # State of one batch. With 2k - 1 columns no run wraps around; `end` folds them to k.
        self._unfolded = torch.empty(0)  # (n, 2k - 1)
        self._norms: dict[str, Tensor] = {}  # each (n,)
        self._small: dict[str, Tensor] = {}  # each (n, entries)
        self.squares: dict[str, Tensor] = {}  # each (n,) in float64
        self.sketch = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        dtype, device = batch.dtype, batch.device
        self._unfolded = torch.zeros(batch.size, 2 * self._dim - 1, dtype=dtype, device=device)
        self._norms, self._small = {}, {}
        self._queue = batch.queue
        zero = torch.zeros(batch.size, dtype=torch.float64, device=device)
        self.squares = dict.fromkeys(batch.parameters, zero) if self._has_norms else {}
        self.sketch = self._unfolded[:, : self._dim]
        if not self._sketches:
            self._prepare({name: p.shape for name, p in batch.parameters.items()}, device)

    def _prepare(self, shapes: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """Draws the random map of each parameter."""
        self._shapes = dict(shapes)
        if not self._has_norms:
            for name, signs in narrowings(shapes, self._seed).items():
                self._narrowings[name] = signs.to(device)
                self._shapes[name] = (shapes[name][0], signs.shape[1])
        made = CountSketch.of_all(self._shapes, self._dim, self._seed)
        self._sketches = {name: sketch.to(device) for name, sketch in made.items()}

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if name in self._narrowings:
            self._by_narrowed(name, gradients)
            return
        factor, *others = gradients.factors
        each = self._bytes_each(factor)
        if others or each > _PIECE or not self._goes_by_entries(factor):
            if self._has_norms:
                self.squares[name] = gradients.squared_norms()
            self.sketch += gradients.sketch(self._sketches[name])
            return
        pieces = _pieces(factor.shape[0], each)
        # A row is in adjacent buckets.
        if prod(factor.shape[1:]) <= _FEW and not self._sketches[name].is_row:
            self._defer(name, factor, pieces)
        else:
            self._by_pieces(name, factor, pieces)

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        sketch = torch.zeros(1, self._dim, dtype=torch.float64, device=self.sketch.device)
        for name, g in gradient.items():
            if name in self._narrowings:
                g = g.double().flatten(1) @ self._narrowings[name].double()
            dense = Dense(g.reshape(1, *self._shapes[name]))
            alone = SampleGradients([dense], bound=4 * g.nbytes)
            sketch = sketch + alone.sketch(self._sketches[name])
        found, expected = [self.sketch[number].double()], [sketch[0]]
        if self._has_norms:
            squares = [self.squares[name][number] for name in gradient]
            norms = [torch.linalg.vector_norm(g.double()) for g in gradient.values()]
            found, expected = [torch.stack(squares).sqrt(), *found], [torch.stack(norms), *expected]
        return SampleReport(torch.cat(found), torch.cat(expected))

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

    def _bytes_each(self, factor: Factor) -> int:
        """Returns the memory that computing the gradient of one sample takes."""
        scratch = factor.scratch
        if isinstance(factor, Convolution):
            if _goes_by_samples_as_groups(factor):
                scratch = 0
            elif factor.groups == 1:
                scratch = prod(factor.kernel[1:]) * factor.positions
        return (prod(factor.shape[1:]) + scratch) * wide(factor.dtype).itemsize

    def _defer(self, name: str, factor: Factor, pieces: list[slice]) -> None:
        """Defers the sketch of small gradients: one sketch costs as much as many together."""
        dtype = wide(factor.dtype)
        gradients = [factor.part(samples).materialize(dtype) for samples in pieces]
        entries = torch.cat(gradients).reshape(factor.shape[0], prod(factor.shape[1:]))
        if self._has_norms:
            self._norms[name] = torch.linalg.vector_norm(entries, dim=1)
        if name in self._small:  # a second part of the same gradient: sketches add up
            self._sketch_small()
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

    def _by_pieces(self, name: str, factor: Factor, pieces: list[slice]) -> None:
        """Computes |G_n|, and adds the sketches to those of the other parameters."""
        dtype = wide(factor.dtype)
        to = self._map(name, dtype)
        norms = []
        for samples in pieces:
            entries = self._signed(factor.part(samples), to, dtype)
            if self._has_norms:
                norms.append(torch.linalg.vector_norm(entries.flatten(1), dim=1))
            self._add(samples, entries, to)
        if self._has_norms:
            self._norms[name] = torch.cat(norms)

    def _by_narrowed(self, name: str, gradients: SampleGradients) -> None:
        """Adds the sketches of G_n B, whose product is smaller than that of G_n."""
        on_cpu = self.sketch.device.type == "cpu"
        bound = _PIECE if on_cpu else gradients.bound
        for factor in gradients.factors:
            to = self._map(name, wide(factor.dtype))
            for samples, product in narrowed(factor, self._narrowings[name], bound):
                if on_cpu:
                    self._add(samples, product.mul_(to.signs), to)
                else:
                    alone = SampleGradients([Dense(product)], bound=bound)
                    self.sketch[samples] += alone.sketch(self._sketches[name])

    def _map(self, name: str, dtype: torch.dtype) -> _Map:
        if (name, dtype) not in self._maps:
            self._maps[name, dtype] = _Map.of(self._sketches[name], dtype)
        return self._maps[name, dtype]

    def _add(self, samples: slice, entries: Tensor, to: _Map) -> None:
        """Adds signed gradients, (m, rows, columns), to the buckets of some samples, on a CPU."""
        for columns, first in to.runs:
            window = self._unfolded.unfold(1, columns.stop - columns.start, 1)
            # The windows overlap, but index_add_ adds the rows one after the other.
            window[samples].index_add_(1, first, entries[:, :, columns].to(window.dtype))

    def _signed(self, factor: Factor, to: _Map, dtype: torch.dtype) -> Tensor:
        """Returns the gradients, (n, rows, columns), with the signs of the map."""
        if isinstance(factor, OuterProduct):
            signed = self._times(factor.input, to.column_signs, dtype)
            return self._product(factor.grad_output, signed, to, dtype)
        if isinstance(factor, Convolution) and _goes_by_samples_as_groups(factor):
            entries = factor.by_samples_as_groups(dtype)
            return entries.view(-1, *to.signs.shape).mul_(to.signs)
        if isinstance(factor, Convolution) and factor.groups == 1:
            signed = self._signed_windows(factor, to.column_signs, dtype)
            return self._product(factor.by_position(), signed, to, dtype)
        entries = factor.materialize(dtype)
        signs = to.signs.view(entries.shape[1:])
        signed = torch.mul(entries, signs, out=self._held("entries", entries.shape, dtype))
        return signed.view(-1, *to.signs.shape)

    def _signed_windows(self, factor: Convolution, signs: Tensor, dtype: torch.dtype) -> Tensor:
        """Copies the windows with the signs of the columns, (n, t, columns)."""
        n, columns, (channels, *taps) = factor.shape[0], len(signs), factor.kernel[1:]
        signs = signs.view(channels, *taps, *[1] * (1 + len(taps)))
        return self._times(factor.columns(), signs, dtype).view(n, columns, -1).mT

    def _times(self, x: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.mul(x, signs, out=self._held("input", x.shape, dtype))

    def _product(self, g: Tensor, x: Tensor, to: _Map, dtype: torch.dtype) -> Tensor:
        """Returns signed Σ_t g ⊗ x, from g (n, t, rows) and x (n, t, columns), which is already signed."""
        n, t, rows = g.shape
        # Writing to reused memory takes half as long as writing to fresh memory.
        g = torch.mul(g.mT, to.row_signs, out=self._held("output", (n, rows, t), dtype))
        entries = self._held("entries", (n, rows, x.shape[2]), dtype)
        return torch.mul(g, x, out=entries) if t == 1 else torch.bmm(g, x, out=entries)

    def _held(self, what: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory that pieces reuse: mapping fresh pages takes as long as a product."""
        size = prod(shape)
        memory = self._memory.get((what, dtype))
        if memory is None or len(memory) < size:
            memory = self._memory[what, dtype] = torch.empty(size, dtype=dtype)
        return memory[:size].view(shape)


def _goes_by_samples_as_groups(factor: Convolution) -> bool:
    """Whether one grouped convolution beats copying windows.

    It copies nothing, and oneDNN, which has no float64, runs it at full width.
    """
    return wide(factor.dtype) == torch.float32 and prod(factor.kernel[2:]) > 1


def _pieces(samples: int, bytes_each: int) -> list[slice]:
    """Splits the samples into pieces whose gradients are computed at once."""
    step = min(at_once(bytes_each, _PIECE), _AT_ONCE)
    return [slice(start, start + step) for start in range(0, samples, step)]
