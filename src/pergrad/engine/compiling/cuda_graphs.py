"""A compiled step as one CUDA graph: what the host would launch again and again is launched at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.kernels.tables import kept_tables

__all__ = ["Replayed"]


class Replayed:
    """`call`, from its second call on, as a CUDA graph of it.

    The first `state` inputs are read and written where they lie; where they lie elsewhere, as after
    `load_state_dict(assign=True)`, another graph is captured. The others are copied to where the graph reads
    them, and the results from where it writes them: graphs that share a `pool` of memory never run at once.
    """

    def __init__(self, call: Callable[..., Sequence[Any]], state: int, pool: Any) -> None:
        self._call = call
        self._state = state
        self._pool = pool
        self._is_warm = False  # the first call does what a capture must not see: it loads kernels
        self._captured: _Captured | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        if not self._is_warm:
            self._is_warm = True
            return self._call(*inputs)
        state, batch = inputs[: self._state], inputs[self._state :]
        if self._captured is None or not self._captured.reads(state):
            # Meanwhile the last one is kept: a pool whose last graph is gone takes no other.
            self._captured = _Captured(self._call, state, batch, self._pool)
        return self._captured.run(batch)


class _Captured:
    def __init__(
        self,
        call: Callable[..., Sequence[Any]],
        state: Sequence[Tensor],
        batch: Sequence[Tensor],
        pool: Any,
    ) -> None:
        self._addresses = [t.data_ptr() for t in state]
        self._batch = [t.clone() for t in batch]
        self._graph = torch.cuda.CUDAGraph()
        try:
            # Relaxed: other threads, such as one that pins memory for a loader, go on meanwhile.
            with (
                kept_tables() as self._tables,
                torch.cuda.graph(self._graph, pool, capture_error_mode="relaxed"),
            ):
                self._results = call(*state, *self._batch)
        except RuntimeError as error:
            raise RuntimeError(
                "the step cannot be captured as a CUDA graph; pass cuda_graphs=False"
            ) from error

    def reads(self, state: Sequence[Tensor]) -> bool:
        """Whether the graph reads these tensors."""
        return self._addresses == [t.data_ptr() for t in state]

    def run(self, batch: Sequence[Tensor]) -> list[Any]:
        for own, given in zip(self._batch, batch, strict=True):
            own.copy_(given)
        self._graph.replay()
        return [t.clone() if isinstance(t, Tensor) else t for t in self._results]


def check_devices(inputs: Sequence[Tensor]) -> None:
    """A graph runs on one GPU, with everything there."""
    devices = {t.device for t in inputs}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "cuda_graphs=True needs the model and the batch on one GPU; "
            f"parameters, buffers and batch are on {found}"
        )
