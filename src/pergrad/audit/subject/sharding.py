"""Says whether `fully_shard` shards a model over the processes of an audit, and describes such a model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from pergrad.distributed.sharding import device_of_steps, policies_of, sharding_modules
from pergrad.distributed.wrappers import refuse_tensor_parallel
from pergrad.errors import AuditError, IndexingError, PergradError

__all__ = [
    "device_of",
    "is_sharded_model",
    "name_of",
    "refuse_index",
    "refuse_other_sharding",
    "structure_of",
]


_PREFIX = "FSDP"  # that `fully_shard` puts in front of the name of a module's class


def is_sharded_model(model: nn.Module) -> bool:
    """Whether all processes must run the model together, since each holds a part of its parameters."""
    return bool(sharding_modules(model))


def device_of(model: nn.Module, wanted: str | None) -> torch.device:
    """Returns the device that a sharded model runs on; refuses another one."""
    found = device_of_steps(model)
    if wanted is not None and torch.device(wanted).type != found.type:
        raise AuditError(
            f"device {wanted!r}: fully_shard has sharded this model over {found.type} devices; leave out the "
            "device"
        )
    return found


def refuse_other_sharding(model: nn.Module, checkpoints: Any) -> None:
    """Refuses what an audit cannot do with a model that is spread over processes."""
    try:
        refuse_tensor_parallel(model, "an audit")
    except PergradError as error:
        raise AuditError(str(error)) from error
    if is_sharded_model(model) and any(not isinstance(made, nn.Module) for made in checkpoints):
        raise AuditError(
            "fully_shard shards this model, so its state dicts cannot be loaded into copies of it: pass "
            "spec.checkpoints as modules, each sharded as the model is"
        )


def refuse_index(model: nn.Module) -> None:
    """Refuses an index of a sharded model: its queries run it in one process alone."""
    if is_sharded_model(model):
        raise IndexingError(
            "an index does not take a model that fully_shard shards: its queries compute gradients in one "
            "process alone; audit it without an index, or build the index of the whole model"
        )


def name_of(model: nn.Module) -> str:
    """Returns the name of a model's class, without what `fully_shard` adds to it."""
    name = type(model).__name__
    return name.removeprefix(_PREFIX) if model in sharding_modules(model) else name


def structure_of(model: nn.Module) -> str:
    """Returns the repr of a model as if it were not sharded, with the precisions that sharding sets."""
    text = repr(model)
    units = sharding_modules(model)
    for name in {type(unit).__name__ for unit in units}:
        text = re.sub(rf"\b{name}\(", f"{name.removeprefix(_PREFIX)}(", text)
    return text + "".join(f" {policy}" for policy in policies_of(units))
