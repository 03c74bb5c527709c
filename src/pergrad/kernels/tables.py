"""Tables of problems for one launch to read, and how long their numbers must stay in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

__all__ = ["kept_tables", "table_of"]

_kept: ContextVar[list[Tensor] | None] = ContextVar("tables", default=None)


def table_of(problems: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Addresses, sizes and strides of several problems, a row each, for one launch to read.

    From step to step most tensors lie where they lay in the last one: a table like an earlier one is not sent
    to the GPU again.
    """
    numbers = array("q", chain.from_iterable(problems))
    kept = _kept.get()
    if kept is None:
        return _sent(numbers.tobytes(), len(problems), device, _stream(device))
    table = _table(numbers, len(problems)).pin_memory()
    kept.append(table)
    return table.to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


@lru_cache(maxsize=1000)
def _sent(numbers: bytes, rows: int, device: torch.device, stream: int) -> Tensor:
    """For each stream its own: nobody waits for another's copy."""
    return _table(bytearray(numbers), rows).to(device, non_blocking=True)


def _table(numbers: array[int] | bytearray, rows: int) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64).view(rows, -1)


@contextmanager
def kept_tables() -> Iterator[list[Tensor]]:
    """What the tables made within are copied from: a CUDA graph reads it again whenever it is run."""
    kept: list[Tensor] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)
