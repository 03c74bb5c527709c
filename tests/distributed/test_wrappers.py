"""Ways to spread a module over ranks that are refused, in a job of one rank or none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pergrad
from pergrad.distributed.wrappers import refuse_repeated_steps, refuse_sharded, spread_of
from pergrad.errors import PergradError


@pytest.fixture
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_of_one_process_is_not_spread() -> None:
    model = nn.Linear(2, 1)
    assert spread_of(model, [], dict(model.named_parameters()), ()).wrapper is None
    refuse_repeated_steps(model, "verify")
    refuse_sharded(model, "compiled", "nothing")


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
        pytest.raises(PergradError, match=r"torch\.distributed\.pipelining .* fully_shard"),
        pergrad.record(model, pergrad.Norms()),
    ):
        stage(lambda: model(torch.ones(3, 2)), hides=hides).sum().backward()
    norms = pergrad.norms(model, lambda model, x: model(x).sum(1), torch.ones(3, 2))
    assert norms.shape == (3,)


@pytest.mark.usefixtures("_job")
def test_other_errors_of_a_block_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    with (
        pytest.raises(RuntimeError, match="own"),
        pergrad.record(model, pergrad.Norms()),
    ):
        raise RuntimeError("its own error")
