"""Joins the stages of a pipeline (`torch.distributed.pipelining`): each rank records its own stage."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pergrad.distributed.groups import Group, Ranks
from pergrad.errors import PergradError

__all__ = ["PIPELINES", "Pipeline", "refuse_pipelines", "running_stage"]

PIPELINES = "torch.distributed.pipelining"
_STAGES = f"{PIPELINES}.stage"  # the module whose frames call a stage
_MICROBATCH = "forward_one_chunk"  # the method that runs a microbatch; others try out shapes


@dataclass(frozen=True)
class Pipeline:
    """The ranks that run the stages of one pipeline, on the same samples."""

    group: Ranks

    @property
    def ranks(self) -> set[int]:
        return {*dist.get_process_group_ranks(self.group)}

    def total(self, t: Tensor) -> Tensor:
        """Returns the sum of a tensor over the stages."""
        return Group(self.group).sum({"stage": t})["stage"]

    def check_units(self, scales: Sequence[float]) -> None:
        """Refuses a loss whose reduction the last stage has undone but others have not."""
        own = torch.tensor(scales, dtype=torch.float64)
        highest, lowest = Group(self.group).bounds(own)
        if not torch.equal(highest, lowest):
            raise PergradError(
                f"the loss of {PIPELINES} is no plain sum over the samples of a microbatch, which the last "
                'stage alone can see: pass loss_reduction="mean" or "sum", and loss_scale= if there is a '
                "factor, to record on every stage"
            )


def _frame_of_stage() -> Any:
    """Finds the innermost frame of a pipeline's stage that is running; None if there is none."""
    if PIPELINES not in sys.modules:
        return None
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != _STAGES:
        frame = frame.f_back
    return frame


def running_stage() -> tuple[Pipeline, bool] | None:
    """Returns the pipeline that calls the module now, and whether it runs a microbatch; None without one."""
    frame = _frame_of_stage()
    if frame is None:
        return None
    stage, names = frame.f_locals.get("self"), []
    while frame is not None and frame.f_globals.get("__name__") == _STAGES:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    if stage is None or stage.num_stages != stage.group_size:
        raise PergradError(
            f"{PIPELINES} runs several stages of its schedule on one rank, whose norms cannot be joined: use "
            "ScheduleGPipe or Schedule1F1B, with one stage for each rank"
        )
    return Pipeline(stage.group), _MICROBATCH in names


def refuse_pipelines() -> None:
    """Refuses a call of a module by a pipeline in a block whose calls have the same samples."""
    if _frame_of_stage() is not None:
        raise PergradError(
            f"{PIPELINES} calls this module once for each microbatch, which are other samples each: pass "
            'calls="more" to record, on every stage'
        )
