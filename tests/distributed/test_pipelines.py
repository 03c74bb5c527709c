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

import pergrad
from pergrad.distributed.pipelines import running_stage
from pergrad.errors import PergradError
from tests.distributed import ranks

MODULE = "tests.distributed.pipeline_checks"
QUICK = (
    "check_gpipe",
    "check_1f1b",
    "check_a_mean_is_undone_by_all_stages_or_refused",
    "check_plain_steps_are_what_they_were",
)


@pytest.fixture(scope="module")
def session() -> dict[str, dict[str, str]]:
    return ranks.run(MODULE, 2, QUICK)


def test_all_ranks_finish(session: dict[str, dict[str, str]]) -> None:
    assert session["session"] == {}


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(session: dict[str, dict[str, str]], name: str) -> None:
    assert session[name] == {}, "\n".join(session[name].values())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_checks(world: int) -> None:
    failed = {name: errors for name, errors in ranks.run(MODULE, world).items() if errors}
    assert failed == {}


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


def test_several_stages_on_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.distributed.pipelining"
    monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    names: dict[str, Any] = {"__name__": f"{name}.stage"}
    exec("def forward_one_chunk(self, run):\n    return run()\n", names)
    two = SimpleNamespace(num_stages=4, group_size=2, group=None)
    with pytest.raises(PergradError, match=r"several stages .* Schedule1F1B"):
        names["forward_one_chunk"](two, running_stage)
    one = SimpleNamespace(num_stages=2, group_size=2, group=None)
    found = names["forward_one_chunk"](one, running_stage)
    assert found is not None
    assert found[1]


@pytest.mark.parametrize("quantity", [pergrad.Projection(4), pergrad.NoiseScale()])
def test_quantities_of_all_parameters_are_refused_on_a_stage(quantity: Any) -> None:
    assert not quantity.spans_stages
