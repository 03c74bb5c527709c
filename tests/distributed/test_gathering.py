"""Whole parameters of sharded modules, in a job of one rank; several are in test_sharding.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pergrad.distributed.gathering import gathered, without_policies
from pergrad.distributed.placing import is_sharded
from pergrad.distributed.sharding import sharding_modules


@pytest.fixture
def model() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (found[0], found):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    yield found
    dist.destroy_process_group()


def test_a_plain_module_is_left_alone() -> None:
    plain = nn.Linear(2, 1)
    with gathered(plain), without_policies(plain):
        assert plain(torch.ones(3, 2)).shape == (3, 1)


def test_parameters_are_whole_within_and_steps_leave_nothing_behind(model: Any) -> None:
    x = torch.ones(5, 3)
    model(x).sum().backward()
    plain = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    with gathered(model):
        assert sharding_modules(model) == []
        assert not any(map(is_sharded, model.parameters()))
        for _ in range(2):
            model(x).sum().backward()
        assert all(p.grad is not None and p.dtype == torch.bfloat16 for p in model.parameters())
        with gathered(model):
            assert not any(map(is_sharded, model.parameters()))
    assert all(map(is_sharded, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    model(x).sum().backward()
    for p, wanted in zip(model.parameters(), plain, strict=True):
        assert torch.equal(p.grad.full_tensor(), wanted)


def test_without_policies_nothing_is_cast(model: Any) -> None:
    with gathered(model):
        assert model(torch.ones(5, 3)).dtype == torch.bfloat16
        with without_policies(model), pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(5, 3))  # its parameters are in the policy's dtype still
        assert model(torch.ones(5, 3)).dtype == torch.bfloat16


def test_an_error_within_shards_the_parameters_again(model: Any) -> None:
    with pytest.raises(ValueError, match="own"), gathered(model):
        raise ValueError("its own error")
    assert all(map(is_sharded, model.parameters()))
