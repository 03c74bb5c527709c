"""Projects gradients to rows: count sketches, dense matrices, two-sided by parameter, or nothing at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isqrt, prod
from typing import Literal, get_args

import torch
from torch import Tensor

from pergrad.errors import IndexingError
from pergrad.factors import Dense
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import CountSketch, SampleGradients, SquaredNorms, TwoSidedSketch
from pergrad.reductions.dense_sketches import DenseSketch, dense_sketch

__all__ = ["ProjectedRows", "Projection", "Projector", "made_projector"]

Projection = Literal["count", "rademacher", "normal", "two_sided", "none"]
Shapes = Mapping[str, torch.Size]
_MOST_KEPT = 2**28  # bytes of dense matrices that are kept from batch to batch
_MOST_WHOLE = 2**26  # numbers of a row that is not projected


class Projector(ABC):
    """A linear map from gradients to rows, fixed by a seed."""

    width: int  # numbers of a row

    @abstractmethod
    def add(self, rows: Tensor, name: str, gradients: SampleGradients) -> None:
        """Adds the projected gradients of one parameter to the rows, (n, width)."""

    def projected(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Projects whole gradients, (n, *shape) by name of parameter, to (n, width)."""
        first = next(iter(gradients.values()))
        rows = first.new_zeros(len(first), self.width)
        for name, g in gradients.items():
            self.add(rows, name, SampleGradients([Dense(g)], bound=g.nbytes + 1))
        return rows


class _Count(Projector):
    """Adds every entry, with a random sign, to one of `dim` buckets."""

    def __init__(self, shapes: Shapes, dim: int, seed: int, device: torch.device) -> None:
        self.width = dim
        made = CountSketch.of_all(shapes, dim, seed)
        self._sketches = {name: sketch.to(device) for name, sketch in made.items()}

    def add(self, rows: Tensor, name: str, gradients: SampleGradients) -> None:
        rows += gradients.sketch(self._sketches[name]).to(rows.dtype)


class _DenseMatrices(Projector):
    """Multiplies by random signs or normal numbers, independent for each entry of the gradient."""

    def __init__(
        self,
        shapes: Shapes,
        dim: int,
        seed: int,
        device: torch.device,
        kind: Literal["rademacher", "normal"],
    ) -> None:
        self.width = dim
        fits = 4 * dim * sum(prod(shape) for shape in shapes.values()) <= _MOST_KEPT
        self._sketches = {
            name: DenseSketch(name, tuple(shape), dim, seed, kind, device, {} if fits else None)
            for name, shape in shapes.items()
        }

    def add(self, rows: Tensor, name: str, gradients: SampleGradients) -> None:
        found = dense_sketch(gradients.factors, self._sketches[name], gradients.bound)
        rows += _scaled(found, gradients).to(rows.dtype)


class _TwoSided(Projector):
    """A G B for each matrix, (a, b) numbers of its own; small gradients are kept whole.

    As in LoGra, gradients of two parameters never meet in one number.
    """

    def __init__(self, shapes: Shapes, dim: int, seed: int, device: torch.device) -> None:
        self._spans: dict[str, slice] = {}
        self._sketches: dict[str, TwoSidedSketch | CountSketch] = {}
        at = 0
        for name, shape in shapes.items():
            size = min(dim, prod(shape))
            self._spans[name] = slice(at, at + size)
            at += size
            if prod(shape) > dim:
                kind = TwoSidedSketch if len(shape) > 1 else CountSketch
                self._sketches[name] = kind.of(name, shape, dim, seed).to(device)
        self.width = at

    def add(self, rows: Tensor, name: str, gradients: SampleGradients) -> None:
        to = rows[:, self._spans[name]]
        if name in self._sketches:
            to += gradients.sketch(self._sketches[name]).to(rows.dtype)
        else:
            to += _flat(gradients, rows.dtype)


class _Whole(Projector):
    """Keeps the gradients as they are, for small models."""

    def __init__(self, shapes: Shapes) -> None:
        self._spans: dict[str, slice] = {}
        at = 0
        for name, shape in shapes.items():
            self._spans[name] = slice(at, at + prod(shape))
            at += prod(shape)
        self.width = at
        if at > _MOST_WHOLE:
            raise IndexingError(
                f"projection='none' would store {at:,} numbers for each sample: choose another projection, "
                f"or "
                "scores without a store (pergrad.index.scores_without_store)"
            )

    def add(self, rows: Tensor, name: str, gradients: SampleGradients) -> None:
        rows[:, self._spans[name]] += _flat(gradients, rows.dtype)


def _flat(gradients: SampleGradients, dtype: torch.dtype) -> Tensor:
    return gradients.materialize(dtype).reshape(gradients.count, prod(gradients.shape))


def _scaled(found: Tensor, gradients: SampleGradients) -> Tensor:
    """Multiplies results of the factors, (n, k), by the scale of each sample."""
    scale = gradients.scale
    return found * (scale.to(found)[:, None] if isinstance(scale, Tensor) else scale)


def made_projector(
    projection: str, shapes: Shapes, dim: int, seed: int, device: torch.device
) -> Projector:
    """Returns the linear map of that name."""
    match projection:
        case "count":
            return _Count(shapes, dim, seed, device)
        case "rademacher":
            return _DenseMatrices(shapes, dim, seed, device, "rademacher")
        case "normal":
            return _DenseMatrices(shapes, dim, seed, device, "normal")
        case "two_sided":
            return _TwoSided(shapes, dim, seed, device)
        case "none":
            return _Whole(shapes)
        case _:
            allowed = ", ".join(map(repr, get_args(Projection)))
            raise IndexingError(f"projection must be one of {allowed}, got {projection!r}")


def default_dim(projection: Projection) -> int:
    """Returns the numbers of a row, or for "two_sided" of each parameter, where none are asked for.

    >>> default_dim("count"), default_dim("two_sided")
    (2048, 256)
    """
    return isqrt(65_536) if projection == "two_sided" else 2048


class ProjectedRows(Quantity):
    """Computes `rows`, (n, width), and `squares`, (n,) in float64: the squared norms over all parameters.

    With `norms=False`, `squares` is None.
    """

    def __init__(self, projector: Projector, *, norms: bool = True) -> None:
        self._projector = projector
        self._has_norms = norms
        self._norms: SquaredNorms | None = None  # of one batch
        self.rows = torch.empty(0)
        self.squares: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        self.rows = torch.zeros(
            batch.size, self._projector.width, dtype=batch.dtype, device=batch.device
        )
        if self._has_norms:
            self.squares = torch.zeros(batch.size, dtype=torch.float64, device=batch.device)
            self._norms = SquaredNorms(batch.queue)

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if self._norms is not None:
            self._norms.add(name, gradients)
        self._projector.add(self.rows, name, gradients)

    def end(self) -> None:
        if self._norms is not None:
            _, squares = self._norms.found()
            if squares is not None:
                self.squares = squares.sum(0)
        self._norms = None

    def abandon(self) -> None:
        self._norms = None
