"""Ways to spread a module over ranks that are refused, in a job of one rank or none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn

import pergrad
from pergrad.distributed.wrappers import refuse_sharded, seed_of_all, spread_of


@pytest.fixture
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_of_one_process_is_not_spread() -> None:
    model = nn.Linear(2, 1)
    assert spread_of(model, [], dict(model.named_parameters()), ()).wrapper is None
    refuse_sharded(model, "compiled", "nothing")


def test_ranks_need_no_common_seed_without_a_step_in_common() -> None:
    assert seed_of_all(nn.Linear(2, 1), None) is None
    assert seed_of_all(nn.Linear(2, 1), 3) == 3


@pytest.mark.usefixtures("_job")
def test_other_errors_of_a_block_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    with (
        pytest.raises(RuntimeError, match="own"),
        pergrad.record(model, pergrad.Norms()),
    ):
        raise RuntimeError("its own error")
