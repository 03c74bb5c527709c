"""Makes sharded parameters whole on every rank for a while, so that each rank can run steps of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from pergrad.distributed.groups import together
from pergrad.distributed.sharding import GATHERED, reshard, sharding_modules
from pergrad.runtime import internals

__all__ = ["gathered", "without_policies"]

# Attributes of a group of parameters, and the values that keep it from communicating.
_ALONE = {"reduce_grads": False, "reshard_after_backward": False, "post_forward_mesh_info": None}


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within, parameters that `fully_shard` shards are whole, and no step communicates over its mesh.

    All ranks must enter; within, each may run as many steps as its samples need. It takes the memory of the
    whole model on every rank. Gradients that are left over at the end are dropped.
    """
    units: list[Any] = [unit for unit in reshard(module) if unit not in GATHERED]
    if not units:
        yield
        return
    inner = {m for unit in units for m in unit.modules() if m is not unit}
    with ExitStack() as undo:
        for unit in units:
            if unit not in inner:
                internals.begin_fsdp(unit)
        for unit in units:
            with together():
                unit.unshard()
            undo.callback(_reshard, unit)
            for group in internals.fsdp_groups_of(unit):
                for name, value in _ALONE.items():
                    undo.callback(setattr, group, name, getattr(group, name))
                    setattr(group, name, value)
                for p in group.fsdp_params:  # gradients stay in the precision of the parameters
                    undo.callback(setattr, p, "reduce_dtype", p.reduce_dtype)
                    p.reduce_dtype = None
        undo.callback(GATHERED.difference_update, units)
        GATHERED.update(units)
        yield


@contextmanager
def without_policies(module: nn.Module) -> Iterator[None]:
    """Within, sharded modules do not cast their arguments and results to the dtypes of their policies."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    units = sharding_modules(module, are_gathered=True)
    with ExitStack() as undo:
        for unit in units:
            state = internals.fsdp_state_of(unit)
            undo.callback(setattr, state, "_mp_policy", state._mp_policy)
            state._mp_policy = fsdp.MixedPrecisionPolicy()
        yield


def _reshard(unit: Any) -> None:
    for group in internals.fsdp_groups_of(unit):
        for p in group.fsdp_params:
            p.unsharded_param.grad = None
    unit.reshard()
