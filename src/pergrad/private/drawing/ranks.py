"""Shares keys and sums between the processes of a run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks"]


class Ranks:
    """The processes of the default group; one process where torch.distributed is not initialised."""

    def __init__(self) -> None:
        is_on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_on else 0
        self.count = dist.get_world_size() if is_on else 1

    def shared(self, key: bytes) -> bytes:
        """Returns the first rank's key on all of them."""
        if self.count == 1:
            return key
        keys: list[bytes | None] = [key]
        dist.broadcast_object_list(keys, src=0)
        assert keys[0] is not None
        return keys[0]

    def agree(self, value: object) -> bool:
        """Whether all ranks have the same value."""
        values: list[object] = [None] * self.count
        dist.all_gather_object(values, value)
        return all(other == value for other in values)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sums tensors over the ranks, in place."""
        if self.count > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def gathered(self, numbers: Tensor) -> Tensor:
        """Concatenates the numbers of all ranks, which have equally many, in their order."""
        if self.count == 1:
            return numbers
        parts = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(parts, numbers)
        return torch.cat(parts)

    def most(self, number: int, device: torch.device) -> int:
        """Returns the largest of the ranks' numbers."""
        if self.count == 1:
            return number
        told = torch.tensor(number, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank."""
        if self.count == 1:
            return flag
        told = torch.tensor(int(flag), device=device)
        dist.all_reduce(told)
        return bool(told.item())
