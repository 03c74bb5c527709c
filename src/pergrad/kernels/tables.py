"""Tables of problems for one launch to read, and how long their numbers must stay in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

import torch
from torch import Tensor

__all__ = ["kept_tables", "table_of"]

_kept: ContextVar[list[Tensor] | None] = ContextVar("tables", default=None)


def table_of(problems: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Addresses, sizes and strides of several problems, a row each, for one launch to read."""
    numbers = array("q", chain.from_iterable(problems))
    table = torch.frombuffer(numbers, dtype=torch.int64).view(len(problems), -1)
    kept = _kept.get()
    if kept is not None:
        table = table.pin_memory()
        kept.append(table)
    return table.to(device, non_blocking=True)


@contextmanager
def kept_tables() -> Iterator[list[Tensor]]:
    """What the tables made within are copied from: a CUDA graph reads it again whenever it is run."""
    kept: list[Tensor] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)
