"""Finds out how a module is spread over ranks before it runs, and refuses ways that cannot be recorded."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pergrad.distributed.sharding import Shards, is_sharded, sharding_modules
from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError

__all__ = ["SHARDING", "refuse_pipelines", "refuse_repeated_steps", "refuse_sharded", "spread_of"]

SHARDING = "fully_shard"
_STAGES = "torch.distributed.pipelining.stage"  # the module whose frames call a stage


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
    for name in sharded:
        if id(weights[name]) not in managed:
            raise PergradError(
                f"parameter {name!r} is a DTensor, and no module inside of the recorded one shards it by "
                "fully_shard: record the module that fully_shard was applied to. Tensor and sequence "
                "parallel models (parallelize_module) cannot be recorded: use fully_shard alone"
            )
        if name in hooked:
            raise PergradError(
                f"parameter {name!r} has a hook, which would get gradients of single samples, whole and not "
                "sharded by fully_shard: remove the hook, or freeze the parameter"
            )
    return Spread(SHARDING, shards=Shards(module, units, weights), module=weakref.ref(module))


def refuse_repeated_steps(module: nn.Module, what: str) -> None:
    """Refuses to repeat steps of a sharded module as often as its batch needs."""
    if sharding_modules(module):
        raise PergradError(
            f"{what} repeats a step as often as the batch of this rank needs, but a module that {SHARDING} "
            "shards runs only if all ranks run it as often: use it on the same module before "
            f"{SHARDING} is applied, on one rank"
        )


def refuse_sharded(module: nn.Module, what: str, instead: str) -> None:
    """Refuses what a sharded module cannot be given to."""
    if sharding_modules(module):
        raise PergradError(
            f"{what} does not take a module that {SHARDING} shards, whose parameters are gathered and freed "
            f"while it runs: {instead}"
        )


def refuse_pipelines() -> None:
    """Refuses a call of a module by a pipeline, whose calls have other samples each."""
    if "torch.distributed.pipelining" not in sys.modules:
        return
    for frame, _ in traceback.walk_stack(None):
        if frame.f_globals.get("__name__") == _STAGES:
            raise PergradError(
                "torch.distributed.pipelining calls this module once for each microbatch, which are other "
                "samples each, and no stage knows the gradients of the others: record the whole model "
                "without a pipeline, sharded by fully_shard if it does not fit"
            )


def _refuse_flat_parameters(module: nn.Module) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for m in module.modules():
        if isinstance(m, fsdp.FullyShardedDataParallel):
            raise PergradError(
                "FullyShardedDataParallel (FSDP1) joins parameters to flat ones, where those of a layer "
                "cannot be told apart: shard the module with torch.distributed.fsdp.fully_shard (FSDP2) "
                "instead"
            )
