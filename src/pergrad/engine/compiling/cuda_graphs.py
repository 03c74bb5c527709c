"""Captures a compiled step as a CUDA graph, so that the host launches all its kernels at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.kernels.tables import kept_tables

__all__ = ["Replayed"]


class Replayed:
    """Runs `call`, from its second call on as a CUDA graph.

    The graph reads and writes the first `state` inputs in place. When their addresses change, as after
    `load_state_dict(assign=True)`, another graph is captured. The other inputs are copied to the graph's own,
    and the results from the graph's own: graphs that share a memory `pool` overwrite each other's.
    """

    def __init__(self, call: Callable[..., Sequence[Any]], state: int, pool: Any) -> None:
        self._call = call
        self._state = state
        self._pool = pool
        self._is_warm = False  # the first call loads kernels, which a capture must not do
        self._captured: _Captured | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Any]:
        if not self._is_warm:
            self._is_warm = True
            return self._call(*inputs)
        state, batch = inputs[: self._state], inputs[self._state :]
        if self._captured is None or not self._captured.reads(state):
            # The last graph lives until the new one is captured: a pool without graphs takes no other.
            self._captured = _Captured(self._call, state, batch, self._pool)
        return self._captured.run(batch)


class _Captured:
    """Holds a CUDA graph, the addresses of the state that it reads, and its own batch and results."""

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
            # Relaxed: other threads, such as a loader's that pins memory, may call CUDA meanwhile.
            with (
                kept_tables() as self._tables,
                torch.cuda.graph(self._graph, pool, capture_error_mode="relaxed"),
            ):
                self._results = call(*state, *self._batch)
        except RuntimeError as error:
            _release_draws()
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


def _release_draws() -> None:
    """Gives the generator of the GPU a new, equal state: a failed capture leaves the old one unusable."""
    if not torch.cuda.is_initialized():
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def check_devices(inputs: Sequence[Tensor]) -> None:
    """Refuses inputs that are not all on one GPU."""
    devices = {t.device for t in inputs}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "cuda_graphs=True needs the model and the batch on one GPU; "
            f"parameters, buffers and batch are on {found}"
        )
