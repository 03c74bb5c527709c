"""Cuts the tensors of a call with DTensors so that its rule gives the gradients of this rank's shard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.distributed.groups import together
from pergrad.errors import PergradError
from pergrad.factors import ALL, Dense, Factor
from pergrad.runtime import wide

__all__ = ["Cutter", "is_sharded", "refuse_sharded_samples", "spread_rows", "whole_of"]

# The tensor whose last dimension is that of the weight's dimension, for weights that are sharded there.
_GRAD = "the gradient of the output"
_SPLITS: Mapping[Callable[..., Any], Mapping[str, Mapping[int, str]]] = {
    F.linear: {"weight": {0: _GRAD, 1: "input"}, "bias": {0: _GRAD}},
    F.embedding: {"weight": {1: _GRAD}},
}
# Vectors that are added up over positions, whatever rank has which.
_SUMMED: Mapping[Callable[..., Any], tuple[str, ...]] = {
    F.linear: ("bias",),
    F.layer_norm: ("weight", "bias"),
    F.rms_norm: ("weight",),
}


def is_sharded(t: Any) -> bool:
    """Whether a tensor is spread over ranks."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # not loaded: there is none
    return tensors is not None and isinstance(t, tensors.DTensor)


def whole_of(t: Tensor) -> Tensor:
    """Returns the whole of a tensor that may be spread over ranks; all of them call it."""
    if not is_sharded(t):
        return t
    spread: Any = t
    kind = spread.device_mesh.device_type
    if spread.device.type != kind:  # shards that are offloaded
        spread = spread.to(kind)
    with together():
        found: Tensor = spread.full_tensor()
    return found


def refuse_sharded_samples(before: Tensor, after: Tensor, dim: int) -> None:
    """Refuses to make a tensor of one rank of a DTensor whose ranks hold other samples, and the reverse."""
    if before.shape[dim] != after.shape[dim]:
        raise PergradError(
            f"a DTensor is sharded along its samples, dimension {dim}: {before.shape[dim]} rows become "
            f"{after.shape[dim]} in a redistribution of parallelize_module; shard sequences or features by "
            "tensor parallelism, and samples by fully_shard or DistributedDataParallel"
        )


def spread_rows(rows: Tensor, like: Any) -> Tensor:
    """Returns gradients of this rank's shard, (n, *local shape), as a DTensor spread like the weight."""
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  # it takes half a second

    kinds = [p if p.is_replicate() else Shard(p.dim + 1) for p in like.placements]
    shape = torch.Size([len(rows), *like.shape])
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(
        rows.contiguous(), like.device_mesh, kinds, run_check=False, shape=shape, stride=stride
    )
    return made


@dataclass
class Cutter:
    """The tensors of one call, and what the gradients of one of its weights need of them."""

    function: Callable[..., Any]
    argument: str  # the name of the weight
    value: Any  # the weight, a DTensor
    _partial: list[int] = field(default_factory=list)  # mesh dimensions whose ranks have terms

    def cut(
        self, grads: Sequence[Tensor | None], kept: Mapping[str, Tensor], dim: int | None
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Returns the output gradients and the kept arguments as tensors of this rank.

        `dim` is the dimension of the samples in the output.
        """
        gradient: Any = grads[0] if len(grads) == 1 else None
        mesh, placements = self.value.device_mesh, self.value.placements
        wanted = {name: [_replicate()] * mesh.ndim for name in (_GRAD, *kept)}
        splits = _SPLITS.get(self.function, {}).get(self.argument, {})
        for k, placed in enumerate(placements):
            if placed.is_replicate():
                along = self._positions(gradient, k, dim)
                if along is not None:
                    self._partial.append(k)
                    for name in wanted:
                        wanted[name][k] = along
                continue
            split = splits.get(placed.dim)
            if split == _GRAD and gradient is not None:
                wanted[_GRAD][k] = type(placed)(gradient.dim() - 1)
            elif split is not None and split in kept:
                wanted[split][k] = type(placed)(kept[split].dim() - 1)
        self._wanted = wanted
        local = [None if g is None else _local(g, wanted[_GRAD]) for g in grads]
        return local, {name: _local(t, wanted[name]) for name, t in kept.items()}

    def _positions(self, gradient: Any, k: int, dim: int | None) -> Any:
        """Returns the placement of a gradient that is sharded along positions, which may stay so."""
        if self.argument not in _SUMMED.get(self.function, ()) or gradient is None:
            return None
        placed = gradient.placements[k]
        if placed.is_replicate() or placed.is_partial() or self.value.dim() != 1:
            return None
        is_position = placed.dim != dim and placed.dim < gradient.dim() - 1
        return placed if is_position and type(placed).__name__ == "Shard" else None

    def finish(self, factor: Factor) -> Factor:
        """Returns the factor of this rank's shard."""
        mesh = self.value.device_mesh
        if self._partial:
            factor = Dense(_sum_over(factor.materialize(wide(factor.dtype)), mesh, self._partial))
        splits = _SPLITS.get(self.function, {}).get(self.argument, {})
        for k, placed in enumerate(self.value.placements):
            if placed.is_replicate() or splits.get(placed.dim) in self._wanted:
                continue
            factor = _part(factor, placed.dim, mesh.size(k), mesh.get_local_rank(k))
        return factor


def _part(factor: Factor, dim: int, of: int, rank: int) -> Factor:
    """Returns a rank's chunk of gradients along a dimension of the weight, as `torch.chunk` cuts."""
    size = factor.shape[dim + 1]
    most = -(-size // of)
    start, stop = min(size, most * rank), min(size, most * (rank + 1))
    if dim == 0 and start < stop:
        return factor.part(ALL, slice(start, stop))
    return Dense(factor.materialize().narrow(dim + 1, start, stop - start))


def _local(t: Tensor, placements: Sequence[Any]) -> Tensor:
    if not is_sharded(t):
        return t
    spread: Any = t
    with together():
        found: Tensor = spread.redistribute(placements=placements).to_local()
    return found.wait() if hasattr(found, "wait") else found


def _sum_over(t: Tensor, mesh: Any, dims: Sequence[int]) -> Tensor:
    """Returns the sum of the terms that ranks along some dimensions of a mesh have."""
    from torch.distributed.tensor import DTensor, Partial  # noqa: PLC0415

    kinds = [Partial() if k in dims else _replicate() for k in range(mesh.ndim)]
    with together():
        found: Tensor = DTensor.from_local(t, mesh, kinds, run_check=False).full_tensor()
    return found


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate  # noqa: PLC0415  # it takes half a second

    return Replicate()
