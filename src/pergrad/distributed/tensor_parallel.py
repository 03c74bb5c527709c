"""Follows parameters that are DTensors: tensor and sequence parallel models, also inside of `fully_shard`.

A factor of such a parameter is that of this rank's shard. Norms are joined over the ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.distributed.groups import together
from pergrad.distributed.placing import is_sharded
from pergrad.factors import Dense, Factor

__all__ = ["Piece", "TensorParallel", "pieces_of"]


@dataclass(frozen=True)
class Piece:
    """How a parameter is spread over the ranks that share its samples."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size  # of the whole parameter

    @classmethod
    def of(cls, parameter: Any, first_dim: int = 0) -> Piece:
        """Reads it from a DTensor; mesh dimensions before `first_dim` are those of `fully_shard`."""
        mesh = parameter.device_mesh
        if first_dim:
            mesh = mesh[mesh.mesh_dim_names[first_dim:]]
        return cls(mesh, tuple(parameter.placements[first_dim:]), parameter.shape)

    @property
    def of_rows(self) -> tuple[Any, ...]:
        """Returns the placements of (n, *shape)."""
        return tuple(
            p if p.is_replicate() or p.is_partial() else type(p)(p.dim + 1) for p in self.placements
        )

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of this rank's shard."""
        sizes = list(self.shape)
        for k, p in enumerate(self.placements):
            if not p.is_replicate():
                of = self.mesh.size(k)
                sizes[p.dim] = len_of_chunk(sizes[p.dim], of, self.mesh.get_local_rank(k))
        return tuple(sizes)

    @property
    def counts(self) -> bool:
        """Whether this rank's share is part of a sum over the mesh, and not a copy of another rank's."""
        return all(
            not p.is_replicate() or self.mesh.get_local_rank(k) == 0
            for k, p in enumerate(self.placements)
        )

    def wrapped(self, local: Tensor) -> Tensor:
        """Returns the DTensor of which `local` is this rank's shard."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  # it takes half a second

        stride = torch.empty(self.shape, device="meta").stride()
        found: Tensor = DTensor.from_local(
            local.contiguous(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=stride,
        )
        return found

    def whole_rows(self, local: Tensor) -> Tensor:
        """Gathers gradients of this rank's shard, (n, *local shape), to those of the whole parameter."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415

        shape = torch.Size([len(local), *self.shape])
        stride = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(
            local.contiguous(), self.mesh, self.of_rows, run_check=False, shape=shape, stride=stride
        )
        with together():
            found: Tensor = spread.full_tensor()
        return found


def len_of_chunk(size: int, of: int, rank: int) -> int:
    """Returns the length of a rank's chunk, as `torch.chunk` cuts.

    >>> [len_of_chunk(5, 4, rank) for rank in range(4)]
    [2, 2, 1, 0]
    """
    most = -(-size // of)
    return max(0, min(most, size - most * rank))


def pieces_of(parameters: Mapping[str, Tensor], managed: Iterable[str]) -> dict[str, Piece]:
    """Finds the parameters that are spread over ranks with the same samples.

    `managed` are the names of those that `fully_shard` shards, on the first dimensions of their meshes.
    """
    found: dict[str, Piece] = {}
    by_fsdp = {*managed}
    for name, p in parameters.items():
        if is_sharded(p):
            spread: Any = p
            dims = data_dims_of(p) if name in by_fsdp else 0
            if dims < spread.device_mesh.ndim:
                found[name] = Piece.of(p, dims)
    return found


def data_dims_of(parameter: Any) -> int:
    """Returns how many dimensions of its mesh `fully_shard` uses: two if it replicates shards, else one."""
    placements = parameter.placements
    return 2 if placements[0].is_replicate() and len(placements) > 1 else 1


class TensorParallel:
    """The parameters of a recorded module that are spread over ranks with the same samples."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self.pieces = pieces

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks that have the same samples as this one."""
        return {int(rank) for piece in self.pieces.values() for rank in piece.mesh.mesh.flatten()}

    def factor(self, name: str, factor: Factor) -> Factor:
        """Returns the factor of this rank's shard for gradients that autograd has made as a DTensor."""
        piece = self.pieces.get(name)
        if piece is None or not isinstance(factor, Dense) or not is_sharded(factor.gradients):
            return factor
        spread: Any = factor.gradients
        with together():
            return Dense(spread.redistribute(placements=piece.of_rows).to_local())

    def joined(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """Sums squared norms, (names, n), over the ranks of the mesh: shards once, copies not again."""
        meshes: dict[int, list[int]] = {}
        for k, name in enumerate(names):
            if name in self.pieces:
                meshes.setdefault(id(self.pieces[name].mesh), []).append(k)
        if not meshes or not squares.shape[1]:
            return squares
        squares = squares.clone()
        for rows in meshes.values():
            pieces = [self.pieces[names[k]] for k in rows]
            mask = torch.tensor([piece.counts for piece in pieces], device=squares.device)
            own = squares[rows].where(mask.unsqueeze(1), 0)
            squares[rows] = summed_over(own, pieces[0].mesh)
        return squares


def summed_over(t: Tensor, mesh: Any) -> Tensor:
    """Returns the sum of a tensor over all ranks of a mesh, on the device that it was on."""
    from torch.distributed.tensor import DTensor, Partial  # noqa: PLC0415

    there = t if mesh.device_type in ("cpu", t.device.type) else t.to(mesh.device_type)
    with together():
        spread = DTensor.from_local(there, mesh, [Partial()] * mesh.ndim, run_check=False)
        found: Tensor = spread.full_tensor()
    return found.to(t.device)
