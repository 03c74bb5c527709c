"""Sums and gathers tensors over the ranks of a process group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from pergrad.errors import PergradError

__all__ = [
    "Group",
    "Ranks",
    "Same",
    "Summing",
    "is_of_lost_rank",
    "is_running",
    "lost_rank",
    "together",
]

Ranks: TypeAlias = "dist.ProcessGroup | None"  # as in torch.distributed; None is the world
_IS_AVAILABLE = dist.is_available()  # whether this torch is built with it
_BUCKET = 32 * 2**20  # bytes that share one collective
# In the messages of gloo, whose errors have no type of their own.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Broken pipe",
)


def is_running() -> bool:
    """Whether this process is one of a torch.distributed job."""
    return _IS_AVAILABLE and dist.is_initialized()


class Summing(Protocol):
    """Sums over ranks."""

    def count(self, own: int) -> int:
        """Returns the sum of a number."""

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the sums of tensors; those that are sharded are sums over ranks already."""

    def is_summed(self, t: Tensor) -> bool:
        """Whether a tensor is a sum over the ranks already."""


class Same:
    """Ranks that all have the same samples: there is nothing to add or to gather."""

    def count(self, own: int) -> int:
        return own

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def is_summed(self, t: Tensor) -> bool:
        return True

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def agree(self, what: str, facts: object) -> None:
        pass


class Group:
    """The ranks of a process group, which all call the same operations in the same order."""

    def __init__(self, group: Ranks = None) -> None:
        if not is_running():
            raise PergradError(
                "there are no other ranks to reduce with: torch.distributed is not initialised in this "
                "process; call torch.distributed.init_process_group first, or leave out the reduction"
            )
        if dist.get_rank(group) < 0:
            raise PergradError(
                f"rank {dist.get_rank()} is not in the process group that was given: reduce only on the "
                "ranks of the group, or pass another group"
            )
        self._group = group
        config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._devices = [part.partition(":")[0] for part in config.split(",")]

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the sums over all ranks, as new tensors; the ranks must have the same names and shapes."""
        self.agree("sums", [(name, t.shape, t.dtype) for name, t in tensors.items()])
        spread: dict[str, Any] = {name: t for name, t in tensors.items() if hasattr(t, "to_local")}
        tensors = {
            name: spread[name].to_local() if name in spread else t for name, t in tensors.items()
        }
        found: dict[str, Tensor] = {}
        for bucket in _buckets(tensors):
            flat = torch.cat([_real(t).reshape(-1) for t in bucket.values()])
            flat = self._reduced(flat)
            sizes = [_real(t).numel() for t in bucket.values()]
            for (name, t), part in zip(bucket.items(), flat.split(sizes), strict=True):
                # A copy: a view would keep the whole bucket alive.
                found[name] = _like(part.clone() if len(bucket) > 1 else part, t)
        for name, t in spread.items():
            found[name] = _as(t, found[name])
        return {name: found[name] for name in tensors}

    def is_summed(self, t: Tensor) -> bool:
        return False

    def count(self, own: int) -> int:
        """Returns the sum of a number over all ranks."""
        return int(self._reduced(torch.tensor([own])))

    def bounds(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the largest and the smallest value of each entry over all ranks."""
        highest, lowest = self._reduced(torch.stack([t, -t]), dist.ReduceOp.MAX)
        return highest, -lowest

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenates (..., n) of all ranks to (..., Σ n), in the order of the ranks."""
        counts = self._gathered(torch.tensor([rows.shape[-1]]))
        sizes = [int(count) for count in counts]
        padded = rows.new_zeros(*rows.shape[:-1], max(sizes))
        padded[..., : rows.shape[-1]] = rows
        parts = self._gathered(padded)
        return torch.cat([part[..., :n] for part, n in zip(parts, sizes, strict=True)], -1)

    def agree(self, what: str, facts: object) -> None:
        """Raises an error on all ranks unless all of them state the same facts."""
        digest = hashlib.sha256(repr(facts).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        bounds = torch.tensor([number, -number])
        highest, lowest = self._reduced(bounds, dist.ReduceOp.MAX).tolist()
        if highest != -lowest:
            raise PergradError(
                f"the ranks cannot join their {what}: rank {dist.get_rank()} holds {facts}, and another rank "
                "something else; record the same module with the same params= and quantities on every "
                "rank, also where a rank has no samples"
            )

    def _reduced(self, t: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a tensor in place where possible; returns it on the device that it was on."""
        there = t.to(self._device_for(t)).contiguous()
        with together():
            dist.all_reduce(there, op, self._group)
        return there.to(t.device)

    def _gathered(self, t: Tensor) -> list[Tensor]:
        there = t.to(self._device_for(t)).contiguous()
        parts = [torch.empty_like(there) for _ in range(self.size)]
        with together():
            dist.all_gather(parts, there, self._group)
        return [part.to(t.device) for part in parts]

    def _device_for(self, t: Tensor) -> torch.device:
        """Returns a device that the group's backend has: NCCL, for example, does not take CPU tensors."""
        if t.device.type in self._devices:
            return t.device
        kind = self._devices[0]
        return (
            torch.device(kind, torch.accelerator.current_device_index())
            if kind != "cpu"
            else (torch.device("cpu"))
        )


@contextmanager
def together() -> Iterator[None]:
    """Says what to do where another rank has failed."""
    try:
        yield
    except RuntimeError as error:  # those of torch.distributed are of this kind
        raise lost_rank(error, "a reduction over ranks") from error


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether torch.distributed has raised an error because another rank has ended, or hangs."""
    kinds = getattr(dist, "DistError", ())
    return isinstance(error, kinds) or any(text in str(error) for text in _LOST)


def lost_rank(error: BaseException, where: str) -> PergradError:
    """Returns an error that says what to do where another rank has failed."""
    return PergradError(
        f"rank {dist.get_rank()} lost another rank of its process group, or waited for it too long, in "
        f"{where}: look for the first error of the others, and start all ranks again, for example with "
        f"torchrun (torch.distributed says: {str(error).strip().splitlines()[0]})"
    )


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Groups tensors of one dtype and device, in their order, up to a number of bytes."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, t in tensors.items():
        first = next(iter(bucket.values()), t)
        is_alike = (first.dtype, first.device) == (t.dtype, t.device)
        if bucket and (not is_alike or held + t.nbytes > _BUCKET):
            yield bucket
            bucket, held = {}, 0
        bucket[name] = t
        held += t.nbytes
    if bucket:
        yield bucket


def _real(t: Tensor) -> Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def _as(t: Any, local: Tensor) -> Tensor:
    """Returns a tensor that is spread over a mesh as `t` is."""
    made: Tensor = type(t).from_local(
        local, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )
    return made


def _like(flat: Tensor, t: Tensor) -> Tensor:
    shaped = flat.view(_real(t).shape)
    return torch.view_as_complex(shaped) if t.is_complex() else shaped
