"""Keeps DistributedDataParallel from reducing gradients that a recording does not make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from pergrad.distributed.groups import is_running
from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError
from pergrad.runtime import internals

__all__ = ["refuse_broadcasts", "without_gradient_reduction"]

# Set to False, they keep the reducer out of a forward pass, and `_DDPSink` off its outputs.
_SWITCHES = ("require_backward_grad_sync", "find_unused_parameters", "static_graph")


@contextmanager
def without_gradient_reduction(
    module: nn.Module, weights: Mapping[str, Tensor], spread: Spread, *, keeps: bool = False
) -> Iterator[None]:
    """Within, a DDP around the module or inside of it runs forward passes and reduces no gradient.

    Recorded parameters get no gradient. A reducer that waits for one makes the next plain step fail, and
    under `static_graph` it counts as the first iteration. `spread` learns which wrapper was there. With
    `keeps`, parameters get their gradients, and the DDP reduces them as ever.
    """
    before: dict[DistributedDataParallel, dict[str, Any]] = {}
    recorded = {id(p) for p in weights.values()}

    def switch_off(called: nn.Module, _: Any) -> None:
        if not isinstance(called, DistributedDataParallel) or called in before:
            return
        if any(m is module for m in called.modules()) or any(m is called for m in module.modules()):
            if not keeps:
                _check(called, recorded)
            before[called] = {} if keeps else {name: getattr(called, name) for name in _SWITCHES}
            for name in before[called]:
                setattr(called, name, False)
            spread.wrapper, spread.ranks = type(called).__name__, called.process_group
            spread.is_joining |= internals.join_config_of(called).enable

    handle = register_module_forward_pre_hook(switch_off)
    try:
        yield
    finally:
        handle.remove()
        for ddp, switches in before.items():
            for name, value in switches.items():
                setattr(ddp, name, value)
            # A plain forward pass asks the next one for a broadcast of buffers if it reduces gradients.
            if switches:
                ddp.require_forward_param_sync = switches["require_backward_grad_sync"]


def refuse_broadcasts(module: nn.Module, what: str) -> None:
    """Refuses a DDP that broadcasts buffers before each step, which a traced step would not do."""
    if not is_running():
        return
    for ddp in module.modules():
        if not isinstance(ddp, DistributedDataParallel) or not ddp.broadcast_buffers:
            continue
        for name, _ in ddp.module.named_buffers():
            raise PergradError(
                f"{what} would not broadcast buffer {name!r} of a DistributedDataParallel before each step: "
                "wrap the module with forward_sync_buffers=False (broadcast_buffers=False in older versions "
                "of torch), or use pergrad.record"
            )


def _check(ddp: DistributedDataParallel, recorded: set[int]) -> None:
    """Refuses a DDP whose other parameters would get gradients that nobody reduces."""
    if ddp.mixed_precision is not None:
        raise PergradError(
            "DistributedDataParallel(mixed_precision=...) replaces the values of parameters while the module "
            "runs, where they cannot be recorded: use torch.autocast, or fully_shard with a "
            "MixedPrecisionPolicy"
        )
    for name, p in ddp.named_parameters():
        if p.requires_grad and id(p) not in recorded:
            raise PergradError(
                f"parameter {name!r} of a DistributedDataParallel is trained but not recorded, and its "
                "gradient would stay on this rank: record the whole wrapper, with params= to choose "
                "parameters, or freeze it"
            )
