"""Copies tensors between the host and a GPU without making either wait for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pergrad.runtime import internals

__all__ = ["Transfer", "pinned"]


class Transfer:
    """Begins to copy tensors to the host; `arrived` waits for them.

    The copies follow the work that computes the tensors, in the order of the GPU's stream: until `arrived` is
    called, the host can queue more work. Tensors on the CPU are returned as they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._arriving = [self._begun(t.detach()) for t in tensors]
        device = next((t.device for t in tensors if t.is_cuda), None)
        if device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @staticmethod
    def _begun(t: Tensor) -> Tensor:
        if not t.is_cuda:
            return t
        host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        return host.copy_(t, non_blocking=True)

    def arrived(self) -> list[Tensor]:
        """Returns the tensors on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._arriving


def pinned(batch: Any, device: torch.device) -> Any:
    """Copies a batch for a GPU to pinned memory: from other memory, copies wait for the GPU's queue."""
    if device.type != "cuda":
        return batch

    def of(value: Any) -> Any:
        is_plain = isinstance(value, Tensor) and value.device.type == "cpu"
        return value.pin_memory() if is_plain and value.layout == torch.strided else value

    return internals.pytree.tree_map(of, batch)
