"""Several processes, as `torchrun` starts them: who is who, and what they agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pergrad.errors import AuditError, ToldElsewhereError

__all__ = ["Ranks", "joined_ranks", "ranks_from"]

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # the slowest rank's shard may take long


@dataclass(frozen=True)
class Ranks:
    """One process among `count`; the first of them writes what is one for all."""

    number: int = 0
    count: int = 1
    local: int = 0

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def all_agree(self, value: T) -> list[T]:
        """What every rank has given, in order. All wait for each other here."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(found, value)
        except RuntimeError as error:  # a connection that was closed
            raise ToldElsewhereError("another process has ended") from error
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Do the work; where it fails on any rank, it fails on all, and the first of those says why."""
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
        """What the first rank finds, on all of them."""
        found = self.together(lambda: decide() if self.is_first else None)
        return self.all_agree(found)[0]  # type: ignore[return-value]


def ranks_from(environment: Mapping[str, str]) -> Ranks:
    """As torchrun says it in the environment, or one process alone."""
    count = int(environment.get("WORLD_SIZE", 1))
    if count == 1:
        return Ranks()
    return Ranks(int(environment["RANK"]), count, int(environment.get("LOCAL_RANK", 0)))


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Within, this process and the others that torchrun has started can agree on things."""
    ranks = ranks_from(os.environ)
    if ranks.count == 1 or dist.is_initialized():
        yield ranks
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
