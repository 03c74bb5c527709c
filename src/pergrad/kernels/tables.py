"""Sends tables of problems to the GPU, for one launch to read."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pergrad.runtime import internals
from pergrad.runtime.caches import cached

__all__ = ["Problems", "kept_tables", "problems_of", "table_of"]

_kept: ContextVar[list[Tensor] | None] = ContextVar("tables", default=None)


class Problems(NamedTuple):
    """Holds addresses, sizes and strides of several problems, a row each."""

    numbers: bytes  # 64-bit integers
    rows: int


def problems_of(rows: Sequence[Sequence[int]]) -> Problems:
    return Problems(array("q", chain.from_iterable(rows)).tobytes(), len(rows))


def table_of(problems: Problems, device: torch.device) -> Tensor:
    """Returns the problems as a tensor on the device.

    Most addresses repeat from step to step, so a table equal to an earlier one is not sent again.
    """
    kept = _kept.get()
    if kept is None:
        return _sent(problems, device, _stream(device))
    table = _table(problems).pin_memory()
    kept.append(table)
    return table.to(device, non_blocking=True)


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = internals.current_raw_stream(index)
    return stream


@cached("tables on a GPU, by their numbers and stream", most=1000)
def _sent(problems: Problems, device: torch.device, stream: int) -> Tensor:
    """Sends a table, once per stream, so that no stream waits for the copy of another."""
    return _table(problems).to(device, non_blocking=True)


def _table(problems: Problems) -> Tensor:
    numbers = torch.frombuffer(bytearray(problems.numbers), dtype=torch.int64)
    return numbers.view(problems.rows, -1)


@contextmanager
def kept_tables() -> Iterator[list[Tensor]]:
    """Collects the host memory of tables made within: a CUDA graph copies from it at every replay."""
    kept: list[Tensor] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)
