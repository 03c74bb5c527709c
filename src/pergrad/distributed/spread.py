"""Says how a recorded module is spread over ranks: by which wrapper, over which process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pergrad.distributed.groups import Group, Ranks, Same, is_running
from pergrad.distributed.pipelines import PIPELINES, Pipeline
from pergrad.distributed.placing import is_sharded
from pergrad.distributed.sharding import Shards
from pergrad.distributed.tensor_parallel import TensorParallel
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
    tensor_parallel: TensorParallel | None = None  # parameters on ranks with the same samples
    pipeline: Pipeline | None = None  # whose stage the recorded module is

    def group(self, ranks: Ranks) -> Group | Same:
        """Returns the group to reduce over: the one given, the wrapper's, or the world."""
        if self.is_joining:
            raise PergradError(
                f"{self.wrapper} runs in the context `Join`: ranks that have run out of data do not take "
                "part in this reduction, which would wait for them forever; leave the context, and give "
                "such ranks empty batches, with 0 samples"
            )
        ranks = self.ranks if ranks is None else ranks
        sharing = self._sharing()
        if not sharing:
            return Group(ranks)
        if ranks is None and len(sharing) == dist.get_world_size():
            return Same()
        how = "tensor parallelism (parallelize_module)"
        if self.pipeline is not None:
            how = f"a pipeline ({PIPELINES})"
        if ranks is None:
            raise PergradError(
                f"some ranks share samples by {how} and others do not: pass the group of the ranks with "
                "other samples, such as group=mesh['dp'].get_group()"
            )
        same = sharing.intersection(dist.get_process_group_ranks(ranks)) - {dist.get_rank()}
        if same:
            raise PergradError(
                f"ranks {sorted(same)} of the group share the samples of rank {dist.get_rank()} by {how}, "
                "and would count them again: pass the group of the data-parallel dimension, such as "
                "mesh['dp'].get_group()"
            )
        return Group(ranks)

    def _sharing(self) -> set[int]:
        """Returns the ranks that have the same samples as this one, if there are others."""
        found: set[int] = set()
        if self.tensor_parallel is not None:
            found |= self.tensor_parallel.ranks
        if self.pipeline is not None:
            found |= self.pipeline.ranks
        return found

    @property
    def is_joined(self) -> bool:
        """Whether norms of this rank's parameters are parts of those of the whole model."""
        return self.tensor_parallel is not None or self.pipeline is not None

    def over_stages(self, sums: Tensor) -> Tensor:
        """Returns sums over parameters, such as squared norms of samples, with those of the other stages."""
        return sums if self.pipeline is None else self.pipeline.total(sums)

    def refuse_shared_names(self, names: Iterable[str], what: str) -> None:
        """Refuses what depends on the names of parameters if several stages of a pipeline share one."""
        if self.pipeline is not None:
            self.pipeline.refuse_shared_names(names, what)

    def local_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """Returns the shape of this rank's shard of a tensor-parallel parameter, or that of all of it."""
        pieces = {} if self.tensor_parallel is None else self.tensor_parallel.pieces
        return pieces[name].local_shape if name in pieces else tuple(parameter.shape)

    def wrapped(self, name: str, sums: Tensor) -> Tensor:
        """Returns sums of a parameter as it is spread: of a tensor-parallel one, as a DTensor."""
        pieces = self.tensor_parallel
        if pieces is None or name not in pieces.pieces or is_sharded(sums):
            return sums
        return pieces.pieces[name].wrapped(sums)

    def joined(self, names: Sequence[str], squares: Tensor) -> Tensor:
        """Returns squared norms of parameters, (names, n), with those of shards on other ranks."""
        pieces = self.tensor_parallel
        return squares if pieces is None else pieces.joined(names, squares)

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
                f"{what} is over the samples of one rank only, but {self.wrapper} keeps the parameters of "
                "all ranks equal, and this step would make them differ: call assign(reduce=True), or "
                "all_reduce() before assign()"
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
