"""Coordinates the processes that `torchrun` starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pergrad.errors import AuditError, InterruptedAuditError, ToldElsewhereError

__all__ = ["Ranks", "joined_ranks", "ranks_from"]

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # the slowest rank may take long


@dataclass(frozen=True)
class Ranks:
    """One process among `count`; the first one writes the results."""

    number: int = 0
    count: int = 1
    local: int = 0
    group: dist.ProcessGroup | None = None  # None: the world

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def all_agree(self, value: T) -> list[T]:
        """Gathers the values of all ranks, in order; waits for all of them."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(found, value, self.group)
        except RuntimeError as error:  # a connection that was closed
            raise InterruptedAuditError(
                "another process has ended: all rows written so far are kept; run the same command to resume"
            ) from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; if it fails on any rank, raises that error on all of them."""
        error: AuditError | None = None
        result: T | None = None
        try:
            result = work()
        except AuditError as found:
            error = found
        for number, other in enumerate(self.all_agree(None if error is None else str(error))):
            if error is not None and number == self.number:
                raise error
            if other is not None:
                raise ToldElsewhereError(f"rank {number}: {other}")
        return result  # type: ignore[return-value]

    def first_decides(self, decide: Callable[[], T]) -> T:
        """Runs `decide` on the first rank and returns its result on all ranks."""
        found = self.together(lambda: decide() if self.is_first else None)
        return self.all_agree(found)[0]  # type: ignore[return-value]


def ranks_from(environment: Mapping[str, str]) -> Ranks:
    """Reads rank and world size from torchrun's environment variables; one process without them."""
    count = int(environment.get("WORLD_SIZE", 1))
    if count == 1:
        return Ranks()
    return Ranks(int(environment["RANK"]), count, int(environment.get("LOCAL_RANK", 0)))


@contextmanager
def joined_ranks(*, by_group: bool = False) -> Iterator[Ranks]:
    """Joins the process group of torchrun within the block.

    With `by_group`, the ranks are those of the process group that a sharded model has, and they talk over a
    group of their own, which waits longer than a step may.
    """
    ranks = ranks_from(os.environ)
    if by_group and dist.get_world_size() > 1:
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        try:
            yield Ranks(dist.get_rank(), dist.get_world_size(), local, group)
        finally:
            dist.destroy_process_group(group)
        return
    if ranks.count == 1 or dist.is_initialized():
        yield ranks
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
