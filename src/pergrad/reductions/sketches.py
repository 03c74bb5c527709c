"""Computes random projections of gradients without holding a gradient or a projection matrix.

A weight is viewed as a matrix: its first dimension is that of the rows, all others are columns, in the order
of memory; a vector is one row. Every row r and every column c has a bucket h and a random sign s. The entry
(r, c) is added, with sign s(r) s(c), to bucket h(r) + h(c) mod k of the sketch. The sketch of an outer
product is then the circular convolution of the sketches of its two vectors, a product of Fourier transforms
(Pham and Pagh's TensorSketch), and that of a row of a table is a rotation. All kinds of factors use one
linear map, so sketches of several uses of a weight add up. The expectation of <s_n, s_m> is <G_n, G_m>.

The buckets of each run of k adjacent rows are a random permutation; a row alone has bucket 0 and sign 1. A
run of k adjacent columns has consecutive buckets, from a random one on: entries of one run in one row never
collide, any others do with probability of about 1 / k, and entries that are adjacent in memory are added to
adjacent buckets. A bucket has at most one entry of each run, so a GPU can read its entries (`Members`)
instead of adding to it.

Buckets and signs come from integer hashes of (seed, parameter, index): they are the same on every
device and for every batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce, singledispatch
from itertools import accumulate
from math import isqrt, prod
from operator import add

import torch
from torch import Tensor

from pergrad.factors import ALL, ByOwner, Factor, OuterProduct, RowSum
from pergrad.reductions.choosing import chooser_of
from pergrad.reductions.tiles import at_once, sample_tiles
from pergrad.runtime import bmm, mm, wide

__all__ = [
    "CountSketch",
    "TwoSidedSketch",
    "as_matrix",
    "count_sketch",
    "hashed_integers",
    "two_sided_sketch",
]


def hashed_integers(counts: Mapping[str, int]) -> list[Tensor]:
    """Returns integers in [0, 2^48) for each label, `counts[label]` of them: splitmix64 from its SHA-256."""
    starts = [hashlib.sha256(label.encode()).digest()[:8] for label in counts]
    start = torch.tensor([int.from_bytes(part, "little", signed=True) for part in starts])
    sizes = list(counts.values())
    first = torch.tensor([0, *accumulate(sizes)][:-1])
    step = -7046029254386353131
    z = torch.arange(1, sum(sizes) + 1) * step
    # All labels at once, since many of them are short.
    z += (start - first * step).repeat_interleave(torch.tensor(sizes))
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    return list(_shifted(z ^ _shifted(z, 31), 16).split(sizes))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifts as if `z` were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signs(label: str, count: int) -> Tensor:
    (hashed,) = hashed_integers({label: count})
    return (hashed & 1) * 2 - 1


@dataclass(frozen=True)
class Members:
    """The entry of each run in each bucket: its index and its sign, 0 where a run has none there.

    Every vector that is sketched reads both again, so they are in the smallest types.
    """

    index: Tensor  # (runs, k) int32
    signs: Tensor  # (runs, k) int8

    @classmethod
    def of(cls, buckets: Tensor, signs: Tensor, size: int) -> Members:
        """Inverts the buckets of entries in which each run of `size` entries has different ones."""
        entries = torch.arange(len(buckets))
        place = entries // size * size + buckets
        found = torch.zeros(2, -(-len(buckets) // size) * size, dtype=torch.int64)
        found[0, place], found[1, place] = entries, signs
        index, signs = found.view(2, -(-len(buckets) // size), size)
        return cls(index.int(), signs.to(torch.int8))

    def to(self, device: torch.device) -> Members:
        return Members(self.index.to(device), self.signs.to(device))


@dataclass(frozen=True)
class CountSketch:
    """Holds the buckets and signs of the rows and columns of one parameter."""

    size: int
    row_buckets: Tensor
    row_signs: Tensor
    column_buckets: Tensor
    column_signs: Tensor
    runs: tuple[int, ...]  # the first bucket of each run of columns
    row_members: Members
    column_members: Members

    @classmethod
    def of(cls, name: str, shape: Sequence[int], size: int, seed: int) -> CountSketch:
        return cls.of_all({name: shape}, size, seed)[name]

    @classmethod
    def of_all(
        cls, shapes: Mapping[str, Sequence[int]], size: int, seed: int
    ) -> dict[str, CountSketch]:
        """Builds the sketches of several parameters, faster than one by one."""
        counts = {}
        for name, shape in shapes.items():
            rows, columns = as_matrix(shape)
            counts[f"{seed}/{name}"] = -(-rows // size) * size + columns
        pairs = zip(shapes.items(), hashed_integers(counts), strict=True)
        return {name: cls._from(hashed, shape, size) for (name, shape), hashed in pairs}

    @classmethod
    def _from(cls, hashed: Tensor, shape: Sequence[int], size: int) -> CountSketch:
        rows, columns = as_matrix(shape)
        runs_of_rows, hashed = hashed.split([len(hashed) - columns, columns])
        row_signs = ((runs_of_rows & 1) * 2 - 1)[:rows]
        # The ranks of random numbers are a random permutation.
        order = (runs_of_rows >> 1).view(-(-rows // size), size).argsort(stable=True, dim=1)
        row_buckets = order.argsort(1).flatten()[:rows]
        if rows == 1:
            row_buckets, row_signs = torch.zeros_like(row_buckets), torch.ones_like(row_signs)
        column_signs, of_columns = (hashed & 1) * 2 - 1, (hashed >> 1) % size
        if columns > 1:
            order = torch.arange(columns)
            of_columns = (of_columns[::size][order // size] + order) % size
        return cls(
            size,
            row_buckets,
            row_signs,
            of_columns,
            column_signs,
            tuple(of_columns[::size].tolist()),
            Members.of(row_buckets, row_signs, size),
            Members.of(of_columns, column_signs, size),
        )

    def to(self, device: torch.device) -> CountSketch:
        rows, columns = (self.row_buckets, self.row_signs), (self.column_buckets, self.column_signs)
        row_buckets, row_signs = (t.to(device) for t in rows)
        column_buckets, column_signs = (t.to(device) for t in columns)
        return CountSketch(
            self.size,
            row_buckets,
            row_signs,
            column_buckets,
            column_signs,
            self.runs,
            self.row_members.to(device),
            self.column_members.to(device),
        )

    @property
    def is_row(self) -> bool:
        """Whether the parameter is a vector or a matrix of one row."""
        return len(self.row_signs) == 1

    def entries(self, first: slice = ALL) -> tuple[Tensor, Tensor]:
        """Returns bucket and sign of each entry, in order, for some indices of the first dimension."""
        rows, columns = (ALL, first) if self.is_row else (first, ALL)
        buckets = self.row_buckets[rows, None] + self.column_buckets[columns]
        signs = self.row_signs[rows, None] * self.column_signs[columns]
        return buckets.flatten() % self.size, signs.flatten()

    def of_rows(self, x: Tensor) -> Tensor:
        """Sketches vectors over rows, (..., rows) -> (..., k), in float32 or wider."""
        if chooser_of(x).pick("sketch of rows") == "gathered":
            return _gathered(x, self.row_members)
        return _scattered(x.to(wide(x.dtype)), self.row_buckets, self.row_signs, self.size)

    def of_columns(self, x: Tensor) -> Tensor:
        """Sketches vectors over columns, (..., columns) -> (..., k), in float32 or wider."""
        way = chooser_of(x).pick("sketch of columns")
        if way == "gathered":
            return _gathered(x, self.column_members)
        x = x.to(wide(x.dtype))
        if way == "runs":
            return self._by_runs(x)
        return _scattered(x, self.column_buckets, self.column_signs, self.size)

    def _by_runs(self, x: Tensor) -> Tensor:
        """Sketches vectors over columns run by run, three times as fast as by entries."""
        k, flat, signs = self.size, x.reshape(-1, x.shape[-1]), self.column_signs.to(x.dtype)
        unfolded = flat.new_zeros(len(flat), 2 * k - 1)  # wide enough that no run wraps around
        for number, first in enumerate(self.runs):
            run = slice(number * k, min((number + 1) * k, flat.shape[1]))
            to = unfolded[:, first : first + run.stop - run.start]
            to.addcmul_(flat[:, run], signs[run])
        out = unfolded[:, :k].contiguous()
        out[:, :-1] += unfolded[:, k:]
        return out.view(*x.shape[:-1], k)


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a parameter; a vector is one row."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


def _scattered(x: Tensor, buckets: Tensor, signs: Tensor, size: int) -> Tensor:
    """Adds entry j of the last dimension, with its sign, to bucket h(j)."""
    if not x.numel():  # of a parameter without elements
        return x.new_zeros(*x.shape[:-1], size)
    flat = x.reshape(-1, x.shape[-1])
    way = chooser_of(x).pick("buckets")
    return BUCKET_WAYS[way](flat, buckets, signs.to(x.dtype), size).reshape(*x.shape[:-1], size)


def _scattered_by_row(flat: Tensor, buckets: Tensor, signs: Tensor, size: int) -> Tensor:
    signed = flat * signs
    return flat.new_zeros(len(flat), size).index_add_(1, buckets, signed)


def _scattered_by_column(flat: Tensor, buckets: Tensor, signs: Tensor, size: int) -> Tensor:
    signed = flat.T * signs.unsqueeze(1)
    return flat.new_zeros(size, len(flat)).index_add_(0, buckets, signed).T


def _gathered(x: Tensor, members: Members) -> Tensor:
    """Reads the entries of each bucket and adds them up: no atomic additions, one pass if compiled."""
    entries = x[..., members.index].to(wide(x.dtype))  # (..., runs, k)
    return (entries * members.signs.to(entries.dtype)).sum(-2)


BUCKET_WAYS = {"by row": _scattered_by_row, "by column": _scattered_by_column}


def count_sketch(factors: Sequence[Factor], sketch: CountSketch, bound: int) -> Tensor:
    """Computes the sketches of Σ_f F_n, (n, k)."""
    return reduce(add, (count_sketch_of(factor, sketch, bound) for factor in factors))


@singledispatch
def count_sketch_of(factor: Factor, sketch: CountSketch, bound: int) -> Tensor:
    """Computes the sketches of one factor, (n, k)."""
    return by_entries(factor, sketch, bound)


def by_entries(factor: Factor, sketch: CountSketch, bound: int) -> Tensor:
    """Adds every entry of the gradient to its bucket, materialising a piece at a time."""
    found: Tensor | None = None
    bound //= 4  # buckets and signs take memory too
    # A row of fewer entries than buckets is added faster entry by entry.
    by_columns = sketch.is_row and len(sketch.column_signs) >= sketch.size
    for samples, rows, gradients in sample_tiles([factor], bound):
        flat = gradients.reshape(len(gradients), prod(gradients.shape[1:]))
        if by_columns and rows == ALL:
            some = sketch.of_columns(flat)
        else:
            some = _scattered(flat, *sketch.entries(rows), sketch.size)
        if rows == ALL and len(some) == factor.shape[0]:
            return some
        if found is None:
            found = some.new_zeros(factor.shape[0], sketch.size)
        found[samples] += some
    if found is None:  # no samples
        return torch.zeros(0, sketch.size, dtype=wide(factor.dtype), device=factor.device)
    return found


@count_sketch_of.register
def _(factor: OuterProduct, sketch: CountSketch, bound: int) -> Tensor:
    _, o, i = factor.shape
    sizes = factor.positions, o, i, sketch.size
    way = chooser_of(factor.grad_output).pick("sketch of an outer product", sizes)
    return SKETCH_WAYS[way](factor, sketch, bound)


def by_fourier(factor: OuterProduct, sketch: CountSketch, bound: int) -> Tensor:
    """Σ_t of circular convolutions, by one inverse transform of a sum of products."""
    n, t, size = factor.shape[0], factor.positions, sketch.size
    dtype = wide(factor.dtype)
    if n == 0 or t == 0:
        return factor.grad_output.new_zeros(n, size, dtype=dtype)
    step = at_once(6 * t * size * dtype.itemsize, bound)
    found = []
    for start in range(0, n, step):
        some = factor.part(slice(start, start + step))
        block = t if step > 1 else at_once(6 * size * dtype.itemsize, bound)
        sums = []
        for first in range(0, t, block):
            at = slice(first, first + block)
            g = torch.fft.rfft(sketch.of_rows(some.grad_output[:, at]).to(dtype))
            x = torch.fft.rfft(sketch.of_columns(some.input[:, at]).to(dtype))
            sums.append(PRODUCT_WAYS[chooser_of(some.input).pick("products of transforms")](g, x))
        found.append(torch.fft.irfft(reduce(add, sums), size))
    return found[0] if len(found) == 1 else torch.cat(found)


def _complex_products(g: Tensor, x: Tensor) -> Tensor:
    return (g * x).squeeze(1) if g.shape[1] == 1 else (g * x).sum(1)


def _real_products(g: Tensor, x: Tensor) -> Tensor:
    """Multiplies real and imaginary parts: a compiler fuses these, and has no complex numbers."""
    (a, b), (c, d) = torch.view_as_real(g).unbind(-1), torch.view_as_real(x).unbind(-1)
    parts = (a * c - b * d).sum(1), (a * d + b * c).sum(1)
    return torch.view_as_complex(torch.stack(parts, -1))


# Σ_t g x of transforms, (n, t, f) -> (n, f)
PRODUCT_WAYS = {"complex": _complex_products, "real": _real_products}
SKETCH_WAYS = {"entries": by_entries, "transforms": by_fourier}


@count_sketch_of.register
def _(factor: RowSum, sketch: CountSketch, bound: int) -> Tensor:
    n, t, width = factor.grad_output.shape
    dtype = wide(factor.dtype)
    step = at_once(t * width * (16 + 2 * dtype.itemsize), bound)
    found = factor.grad_output.new_zeros(n, sketch.size, dtype=dtype)
    for start in range(0, n, step):
        some = factor.part(slice(start, start + step))
        buckets = sketch.row_buckets[some.index].unsqueeze(-1) + sketch.column_buckets
        signs = sketch.row_signs[some.index].unsqueeze(-1) * sketch.column_signs
        entries = (some.grad_output.to(dtype) * signs.to(dtype)).flatten(1)
        found[start : start + step].scatter_add_(1, buckets.flatten(1) % sketch.size, entries)
    return found


@count_sketch_of.register
def _(factor: ByOwner, sketch: CountSketch, bound: int) -> Tensor:
    each = count_sketch_of(factor.each, sketch, bound)
    return each.new_zeros(factor.samples, sketch.size).index_add_(0, factor.owner, each)


@dataclass(frozen=True)
class TwoSidedSketch:
    """A G Bᵀ / √(ab), with random signs A (a, rows) and B (b, columns)."""

    left: Tensor  # (rows, a)
    right: Tensor  # (columns, b)

    @classmethod
    def of(cls, name: str, shape: Sequence[int], size: int, seed: int) -> TwoSidedSketch:
        rows, columns = _sides(shape)
        a = next(a for a in range(isqrt(size), 0, -1) if size % a == 0)
        left = _signs(f"{seed}/{name}/left", rows * a).view(rows, a)
        right = _signs(f"{seed}/{name}/right", columns * (size // a)).view(columns, -1)
        return cls(left.float(), right.float())

    def to(self, device: torch.device) -> TwoSidedSketch:
        return TwoSidedSketch(self.left.to(device), self.right.to(device))


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns of a parameter; a vector is one column, which can be cut into pieces."""
    return (shape[0], prod(shape[1:])) if len(shape) else (1, 1)


def two_sided_sketch(factors: Sequence[Factor], sketch: TwoSidedSketch, bound: int) -> Tensor:
    """Computes the two-sided sketches of Σ_f F_n, (n, a · b)."""
    total = reduce(add, (two_sided_sketch_of(factor, sketch, bound) for factor in factors))
    return total / total.shape[1] ** 0.5


@singledispatch
def two_sided_sketch_of(factor: Factor, sketch: TwoSidedSketch, bound: int) -> Tensor:
    """A G Bᵀ for one factor, (n, a · b)."""
    size = sketch.left.shape[1] * sketch.right.shape[1]
    found = torch.zeros(factor.shape[0], size, dtype=wide(factor.dtype), device=factor.device)
    for samples, rows, gradients in sample_tiles([factor], bound):
        matrix = gradients.reshape(len(gradients), *_sides(gradients.shape[1:]))
        left, right = sketch.left[rows].to(matrix), sketch.right.to(matrix)
        found[samples] += (left.T @ (matrix @ right)).flatten(1)
    return found


@two_sided_sketch_of.register
def _(factor: OuterProduct, sketch: TwoSidedSketch, bound: int) -> Tensor:
    dtype = wide(factor.dtype)
    g = _by_signs(factor.grad_output, sketch.left, dtype)
    x = _by_signs(factor.input, sketch.right, dtype)
    return bmm(g.mT, x, dtype).flatten(1)


def _by_signs(x: Tensor, signs: Tensor, dtype: torch.dtype) -> Tensor:
    """X @ signs, (n, t, d) @ (d, a), in `dtype`; signs are exact in half precision, so x stays as it is."""
    return mm(x.flatten(0, -2), signs.to(x.dtype), dtype).view(*x.shape[:-1], signs.shape[1])


@two_sided_sketch_of.register
def _(factor: RowSum, sketch: TwoSidedSketch, bound: int) -> Tensor:
    dtype = wide(factor.dtype)
    x = _by_signs(factor.grad_output, sketch.right, dtype)
    return bmm(sketch.left.to(dtype)[factor.index].mT, x, dtype).flatten(1)


@two_sided_sketch_of.register
def _(factor: ByOwner, sketch: TwoSidedSketch, bound: int) -> Tensor:
    each = two_sided_sketch_of(factor.each, sketch, bound)
    return each.new_zeros(factor.samples, each.shape[1]).index_add_(0, factor.owner, each)
