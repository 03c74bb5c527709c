"""Joins the stages of a pipeline (`torch.distributed.pipelining`): each rank records its own stage."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pergrad.distributed.groups import Group, Ranks
from pergrad.errors import PergradError

__all__ = ["PIPELINES", "Pipeline", "RunningStage", "refuse_pipelines", "running_stage"]

PIPELINES = "torch.distributed.pipelining"
_STAGES = f"{PIPELINES}.stage"  # the module whose frames call a stage
_SCHEDULES = f"{PIPELINES}.schedules"
_MICROBATCH = "forward_one_chunk"  # the method that runs a microbatch; others try out shapes
# Schedules whose backward passes have two parts.
_SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


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

    def refuse_shared_names(self, names: Iterable[str], what: str) -> None:
        """Refuses a quantity that tells parameters apart by name if two stages have one of the same name."""
        own = {_number_of(name): name for name in names}
        everywhere = Group(self.group).gather(torch.tensor([*own], dtype=torch.int64))
        numbers, counts = everywhere.unique(return_counts=True)
        shared = {*numbers[counts > 1].tolist()}
        if shared:
            name = next((own[number] for number in own if number in shared), None)
            which = (
                "parameters of other stages" if name is None else f"parameter {name!r} of a stage"
            )
            raise PergradError(
                f"{what} tells parameters apart by their names, but {which} of {PIPELINES} has the same name "
                "as a parameter of another stage: name the modules of each stage as in the whole model"
            )

    def check_units(self, scales: Sequence[float]) -> None:
        """Refuses a loss whose reduction the last stage has undone but others have not."""
        own = torch.tensor(scales, dtype=torch.float64)
        highest, lowest = Group(self.group).bounds(own)
        if not torch.equal(highest, lowest):
            raise PergradError(
                f"the loss of {PIPELINES} is not a plain sum over the samples of a microbatch, and only the "
                'last stage can see this: pass loss_reduction="mean" or "sum", and loss_scale= if there is a '
                "factor, to record on every stage"
            )


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _frame_of_stage() -> Any:
    """Finds the innermost frame of a pipeline's stage that is running; None if there is none."""
    if PIPELINES not in sys.modules:
        return None
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != _STAGES:
        frame = frame.f_back
    return frame


class RunningStage(NamedTuple):
    """A call of a stage: its pipeline, the number of its microbatch, and how many stages the rank has.

    There is no number while torch tries out the shapes of a stage.
    """

    pipeline: Pipeline
    microbatch: int | None
    stages: int


def running_stage() -> RunningStage | None:
    """Returns the stage of a pipeline that calls the module now; None without one."""
    frame = _frame_of_stage()
    if frame is None:
        return None
    stage, microbatch = frame.f_locals.get("self"), None
    while frame is not None and frame.f_globals.get("__name__") == _STAGES:
        if frame.f_code.co_name == _MICROBATCH:
            microbatch = frame.f_locals.get("fwd_chunk_id")
        frame = frame.f_back
    _refuse_split_backwards(frame)
    return RunningStage(Pipeline(stage.group), microbatch, stage.num_stages // stage.group_size)


def _refuse_split_backwards(frame: Any) -> None:
    """Refuses schedules that compute the gradients of inputs and weights apart."""
    while frame is not None and frame.f_globals.get("__name__") != _SCHEDULES:
        frame = frame.f_back
    name = "" if frame is None else type(frame.f_locals.get("self")).__name__
    if name in _SPLIT:
        raise PergradError(
            f"{name} of {PIPELINES} computes weight gradients in a backward pass of their own, which cannot "
            "be recorded: use ScheduleGPipe, Schedule1F1B or ScheduleInterleaved1F1B"
        )


def refuse_pipelines() -> None:
    """Refuses a call of a module by a pipeline in a block whose calls have the same samples."""
    if _frame_of_stage() is not None:
        raise PergradError(
            f"{PIPELINES} calls this module once for each microbatch, which are other samples each: pass "
            'calls="more" to record, on every stage'
        )
