"""Finds out how a module is spread over ranks before it runs, and refuses ways that cannot be recorded."""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.distributed.groups import is_running
from pergrad.distributed.sharding import Shards, is_sharded, sharding_modules
from pergrad.distributed.spread import Spread
from pergrad.distributed.tensor_parallel import (
    Piece,
    TensorParallel,
    pieces_of,
    summed_over,
)
from pergrad.errors import PergradError
from pergrad.runtime import internals

__all__ = ["SHARDING", "refuse_sharded", "refuse_tensor_parallel", "seed_of_all", "spread_of"]

SHARDING = "fully_shard"


def spread_of(
    module: nn.Module,
    units: Sequence[nn.Module],
    weights: Mapping[str, Tensor],
    hooked: Container[str],
) -> Spread:
    """Returns how a module is spread; `units` are the modules that shard parameters.

    `weights` are the recorded parameters, `hooked` the names of those with hooks of the user.
    """
    _refuse_flat_parameters(module)
    sharded = [name for name, p in weights.items() if is_sharded(p)]
    if not sharded:
        return Spread(module=weakref.ref(module))
    managed = {id(p) for unit in units for p in unit.parameters()}
    by_fsdp = [name for name in sharded if id(weights[name]) in managed]
    whole = {
        id(p) for unit in sharding_modules(module, are_gathered=True) for p in unit.parameters()
    }
    _refuse_parts_of_units(module, {id(weights[name]) for name in sharded} - managed - whole)
    for name in sharded:
        if name in hooked:
            raise PergradError(
                f"parameter {name!r} has a hook, which would get gradients of single samples, whole and not "
                f"sharded by {SHARDING if name in by_fsdp else 'parallelize_module'}: remove the hook, or "
                "freeze the parameter"
            )
    found = Spread(module=weakref.ref(module))
    pieces = pieces_of(weights, by_fsdp)
    if pieces:
        _check_placements(pieces)
        found.tensor_parallel = TensorParallel(pieces)
    if by_fsdp:
        for name in pieces:
            if name not in by_fsdp:
                raise PergradError(
                    f"parameter {name!r} is spread by parallelize_module alone, others by {SHARDING} too: "
                    f"apply {SHARDING} to the whole module as well"
                )
        own = {name: p for name, p in weights.items() if name in by_fsdp or not is_sharded(p)}
        found.wrapper, found.shards = SHARDING, Shards(module, units, own)
        if pieces:
            found.ranks = found.shards.ranks
    return found


def _refuse_parts_of_units(module: nn.Module, others: set[int]) -> None:
    """Refuses DTensors that a module outside of the recorded one shards: it unshards them out of sight."""
    for name, m in module.named_modules():
        for key, p in m.named_parameters(recurse=False):
            if id(p) in others and internals.is_managed_by_fsdp(m):
                raise PergradError(
                    f"parameter {f'{name}.{key}'.lstrip('.')!r} is sharded by {SHARDING} of a module around "
                    f"the recorded one: record the module that {SHARDING} was applied to"
                )


def _check_placements(pieces: Mapping[str, Piece]) -> None:
    for name, piece in pieces.items():
        for placed in piece.placements:
            if not placed.is_replicate() and type(placed).__name__ != "Shard":
                raise PergradError(
                    f"parameter {name!r} is a DTensor with placement {placed}, which cannot be recorded: use "
                    "Shard or Replicate, as parallelize_module does"
                )


def seed_of_all(module: nn.Module, seed: int | None) -> int | None:
    """Draws a random seed for all ranks that run a tensor-parallel step together, if none is given.

    The others need none in common: None leaves it to the caller.
    """
    if seed is not None or not is_running():
        return seed
    spread: list[Any] = [p for p in module.parameters() if is_sharded(p)]
    if not spread:
        return None
    own = secrets.randbits(32)
    for mesh in {id(p.device_mesh): p.device_mesh for p in spread}.values():
        is_first = not any(mesh.get_coordinate())
        device = spread[0].to_local().device
        own = int(summed_over(torch.tensor([own if is_first else 0], device=device), mesh))
    return own


def refuse_sharded(module: nn.Module, what: str, instead: str) -> None:
    """Refuses what a sharded module cannot be given to."""
    if sharding_modules(module):
        raise PergradError(
            f"{what} does not take a module that {SHARDING} shards, whose parameters are gathered and freed "
            f"while it runs: {instead}"
        )
    for name, p in module.named_parameters():
        if is_sharded(p):
            raise PergradError(
                f"{what} does not take a tensor-parallel module (parallelize_module), such as one whose "
                f"parameter {name!r} is a DTensor: {instead}"
            )


def refuse_tensor_parallel(module: nn.Module, what: str) -> None:
    """Refuses a module whose parameters are spread over ranks that must have the same samples."""
    managed = {id(p) for unit in sharding_modules(module) for p in unit.parameters()}
    own = dict(module.named_parameters())
    for name in pieces_of(own, [name for name, p in own.items() if id(p) in managed]):
        raise PergradError(
            f"{what} gives every rank samples of its own, and parameter {name!r} is spread by tensor "
            f"parallelism (parallelize_module) over ranks that must share theirs: use {SHARDING} alone"
        )


def _refuse_flat_parameters(module: nn.Module) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for m in module.modules():
        if isinstance(m, fsdp.FullyShardedDataParallel):
            raise PergradError(
                "FullyShardedDataParallel (FSDP1) flattens the parameters of several layers into one, so "
                "layers cannot be recorded: shard the module with torch.distributed.fsdp.fully_shard (FSDP2) "
                "instead"
            )
