"""Records the tensors that stand for sharded parameters while a module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from pergrad.distributed.sharding import Shards, is_sharded
from pergrad.engine.collecting.kept_gradients import KeptGradients
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.intercepting.weights import refusing_ordinary_gradients

__all__ = ["Adopter"]


class Adopter:
    """Makes unsharded tensors roots of a recording, by the names of their parameters."""

    def __init__(
        self,
        shards: Shards,
        recorder: Recorder,
        may_reach_weights: Callable[[], bool],
        kept: KeptGradients | None = None,
    ) -> None:
        self._shards = shards
        self._recorder = recorder
        self._may_reach_weights = may_reach_weights
        self._kept = kept
        self._adopted: dict[int, tuple[str, Tensor]] = {}  # keeps the ids valid
        self._refusals: ExitStack | None = None

    def adopt(self) -> None:
        """Adopts all tensors that stand for parameters now."""
        for t, name in self._shards.unsharded():
            if id(t) in self._adopted:
                continue
            if is_sharded(t) and not self._shards.is_tensor_parallel(name):
                continue  # sharded over fewer ranks after the forward: `reshard_after_forward=2`
            Tracker.unmark(t)
            self._adopted[id(t)] = name, t
            self._recorder.add_root(name, t)
            self._refuse(name, t)

    def _refuse(self, name: str, t: Tensor) -> None:
        if self._refusals is not None:
            refusing = refusing_ordinary_gradients({name: t}, self._may_reach_weights, self._kept)
            self._refusals.enter_context(refusing)

    @contextmanager
    def refusing_gradients(self) -> Iterator[None]:
        """Makes an ordinary gradient for an adopted tensor an error within the block."""
        with ExitStack() as refusals:
            self._refusals = refusals
            for name, t in self._adopted.values():
                self._refuse(name, t)
            try:
                yield
            finally:
                self._refusals = None
