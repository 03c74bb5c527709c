"""Says how a recorded module is spread over ranks: by which wrapper, over which process group."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pergrad.distributed.groups import Group, Ranks, is_running
from pergrad.distributed.sharding import Shards
from pergrad.errors import PergradError
from pergrad.runtime.caches import CACHES

__all__ = ["Spread"]

_ALONE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
CACHES.add(__name__, "modules that no wrapper holds", "at most the modules alive", _ALONE)


@dataclass
class Spread:
    """What a recording has found out about its module; filled while the module runs."""

    wrapper: str | None = None  # that keeps the parameters of all ranks equal
    ranks: Ranks = None  # of the wrapper
    is_joining: bool = False  # whether ranks may have left, in the context `Join`
    shards: Shards | None = None  # the parameters that `fully_shard` shards
    module: weakref.ref[nn.Module] | None = None  # the recorded module

    def group(self, ranks: Ranks) -> Group:
        """Returns the group to reduce over: the one given, the wrapper's, or the world."""
        if self.is_joining:
            raise PergradError(
                f"{self.wrapper} runs in the context `Join`: ranks that have run out of data do not take "
                "part in this reduction, which would wait for them forever; leave the context, and give "
                "such ranks empty batches, with 0 samples"
            )
        return Group(self.ranks if ranks is None else ranks)

    def check_mesh(self, ranks: Ranks) -> None:
        """Refuses a group for sums that are over the ranks of a mesh already."""
        if ranks is not None:
            raise PergradError(
                f"sums of parameters that {self.wrapper} shards are over all ranks of its mesh: leave out "
                "group="
            )

    def refuse_local(self, what: str) -> None:
        """Raises an error if the ranks would go apart by a sum of one rank's samples."""
        if self.wrapper is None and is_running() and dist.get_world_size() > 1:
            self.wrapper = _wrapper_around(None if self.module is None else self.module())
        if self.wrapper is not None:
            raise PergradError(
                f"{what} holds the samples of one rank only, but {self.wrapper} keeps the parameters of "
                "all ranks equal, and they would go apart: call assign(reduce=True), or all_reduce() "
                "before assign()"
            )


def _wrapper_around(module: nn.Module | None) -> str | None:
    """Names the DDP around a module that was called past it; looks through all objects, once for a module."""
    if module is None or module in _ALONE:
        return None
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and any(
            m is module for m in found.modules()
        ):
            return type(found).__name__
    _ALONE.add(module)
    return None
