"""Runs a loss function plainly, from the state that a call began with, and pulls losses back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.looping.pulling_back import pulled_back
from pergrad.engine.looping.slices import ownership_of_batch
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.owning import Ownership
from pergrad.runtime import without_autocast

__all__ = ["CannotLoopError", "PlainRun"]

_KNOWN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class CannotLoopError(Exception):
    """Raised within the package where a loop does not give the gradients of the batch; says why."""


@dataclass
class PlainRun:
    """A model, its loss function and a batch; `passes` counts backward passes."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Any, ...]
    options: Options
    parameters: Mapping[str, Tensor]  # those whose gradients are asked for
    before: Snapshot
    passes: int = field(default=0, init=False)

    @cached_property
    def device(self) -> torch.device:
        first = next(iter(self.parameters.values()), None)
        return torch.device("cpu") if first is None else first.device

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Returns the dtypes that decide how much two runs may differ by rounding."""
        own = [p.dtype.to_real() if p.is_complex() else p.dtype for p in self.parameters.values()]
        if torch.is_autocast_enabled(self.device.type):
            own.append(torch.get_autocast_dtype(self.device.type))
        return {dtype for dtype in own if dtype in _KNOWN} or {torch.float32}

    def forward(self, batch: tuple[Any, ...]) -> Tensor:
        """Returns the losses of a batch, from the state that the call began with."""
        self.before.restore()
        losses = self.loss_fn(self.model, *batch)
        if batch is not self.batch or self.ownership is None or not isinstance(losses, Tensor):
            return losses
        return self.ownership.summed(losses)

    @cached_property
    def ownership(self) -> Ownership | None:
        """Returns the owners of the rows, where samples have several."""
        return ownership_of_batch(self.loss_fn, self.batch, self.options)

    def pulled_back(
        self, losses: Tensor, weights: Tensor, names: Sequence[str], *, retain_graph: bool = False
    ) -> dict[str, Tensor]:
        """Returns the gradients of some parameters for Σ_n weights[n] losses[n]."""
        self.passes += 1
        with without_autocast(self.device):
            return pulled_back(
                [losses],
                [weights],
                {name: self.parameters[name] for name in names},
                self.model.parameters(),
                retain_graph=retain_graph,
            )

    def clock(self) -> float:
        """Returns the time in seconds when all work so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
