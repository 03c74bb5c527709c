"""Pipelines on several ranks, one stage on each, and how they are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import pergrad
from pergrad.distributed.pipelines import running_stage
from pergrad.errors import PergradError
from tests.distributed.sessions import checks_on_ranks

QUICK = (
    "check_gpipe",
    "check_1f1b",
    "check_inner_products_are_those_of_the_whole_model",
    "check_sketches_are_those_of_the_whole_model",
    "check_several_stages_on_a_rank",
    "check_two_steps_of_several_stages_in_a_block",
    "check_a_mean_is_undone_by_all_stages_or_refused",
    "check_plain_steps_are_what_they_were",
)


TestOnRanks = checks_on_ranks("tests.distributed.pipeline_checks", quick=QUICK, worlds=(1, 2, 4))


@pytest.fixture
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stage(run: Callable[[], Tensor], *, hides: bool) -> Tensor:
    """Calls `run` from a frame of torch.distributed.pipelining, which wraps its errors."""
    code = "def forward(run):\n    return run()\n"
    if hides:
        code = (
            "def forward(run):\n    try:\n        return run()\n    except Exception as error:\n"
            "        raise RuntimeError('a stage failed') from error\n"
        )
    names: dict[str, Any] = {"__name__": "torch.distributed.pipelining.stage"}
    exec(code, names)
    found: Tensor = names["forward"](run)
    return found


@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize("hides", [False, True])
def test_a_pipeline_is_refused_by_its_name(hides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.pipelining"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    model = nn.Linear(2, 1)
    with (
        pytest.raises(PergradError, match=r'torch\.distributed\.pipelining .* calls="more"'),
        pergrad.record(model, pergrad.Norms()),
    ):
        stage(lambda: model(torch.ones(3, 2)), hides=hides).sum().backward()
    norms = pergrad.norms(model, lambda model, x: model(x).sum(1), torch.ones(3, 2))
    assert norms.shape == (3,)


def test_without_a_pipeline_no_stage_runs() -> None:
    assert running_stage() is None


def microbatch(of: Any, run: Callable[[], Any], schedule: Any = None) -> Any:
    """Calls `run` as a stage does in its second microbatch."""
    name = "torch.distributed.pipelining"
    stages: dict[str, Any] = {"__name__": f"{name}.stage"}
    exec("def forward_one_chunk(self, fwd_chunk_id, run):\n    return run()\n", stages)
    schedules: dict[str, Any] = {"__name__": f"{name}.schedules"}
    exec("def step(self, run):\n    return run()\n", schedules)
    return schedules["step"](schedule, lambda: stages["forward_one_chunk"](of, 1, run))


def test_a_stage_tells_its_microbatch_and_how_many_there_are_on_the_rank() -> None:
    several = SimpleNamespace(num_stages=4, group_size=2, group=None)
    found = microbatch(several, running_stage)
    assert found is not None
    assert (found.microbatch, found.stages) == (1, 2)


def test_schedules_with_split_backward_passes_are_refused() -> None:
    several = SimpleNamespace(num_stages=4, group_size=2, group=None)
    schedule = ScheduleInterleavedZeroBubble.__new__(ScheduleInterleavedZeroBubble)
    with pytest.raises(PergradError, match=r"ScheduleInterleavedZeroBubble .* Schedule1F1B"):
        microbatch(several, running_stage, schedule)


@pytest.mark.usefixtures("_job")
def test_some_of_the_stages_of_a_rank_are_not_recorded_alone() -> None:
    model, two = nn.Linear(2, 1), SimpleNamespace(num_stages=2, group_size=1, group=None)
    with (
        pytest.raises(PergradError, match=r"runs 2 stages .* 1 of them .* nn\.ModuleList"),
        pergrad.record(model, pergrad.Norms(), calls="more"),
    ):
        microbatch(two, lambda: model(torch.ones(3, 2)))


@pytest.mark.usefixtures("_job")
def test_a_microbatch_that_misses_a_stage_of_its_rank_is_an_error() -> None:
    stages = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    two = SimpleNamespace(num_stages=2, group_size=1, group=None)
    with (
        pytest.raises(PergradError, match="has run through 1 of the 2 stages"),
        pergrad.record(stages, pergrad.Norms(), calls="more"),
    ):
        microbatch(two, lambda: stages[0](torch.ones(3, 2))).sum().backward()


class Largest(pergrad.Quantity):
    """The largest entry over all parameters, which is not that of one stage."""

    def begin(self, batch: Any) -> None: ...
    def consume(self, name: str, gradients: Any) -> None: ...
    def end(self) -> None: ...


@pytest.mark.usefixtures("_job")
def test_quantities_that_do_not_say_that_they_span_stages_are_refused() -> None:
    model = nn.Linear(2, 1)
    place = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(place, n_microbatches=1, loss_fn=lambda out, target: out.sum())
    with (
        pytest.raises(PergradError, match="Largest needs the gradients of all parameters"),
        pergrad.record(model, Largest(), calls="more"),
    ):
        schedule.step(torch.ones(3, 2), target=torch.ones(3))
