"""Sums and gathers over ranks, in a job of one process; two are in test_data_parallel.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pergrad.distributed import groups
from pergrad.distributed.groups import Group, is_running
from pergrad.errors import PergradError
from tests.distributed import ranks


@pytest.fixture
def world() -> Iterator[Group]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Group()
    dist.destroy_process_group()


def test_without_a_job_the_error_says_how_to_start_one() -> None:
    assert not is_running()
    with pytest.raises(PergradError, match="init_process_group"):
        Group()


def test_sums_keep_names_shapes_dtypes_and_leave_the_tensors_alone(
    world: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(3, 2).T,
        "c": torch.randn(2, dtype=torch.complex64),
        "d": torch.randn(0, 2, dtype=torch.float64),
        "e": torch.randn((), dtype=torch.float64),
    }
    monkeypatch.setattr(groups, "_BUCKET", 30)
    found = world.sum(tensors)
    assert list(found) == list(tensors)
    for name, t in tensors.items():
        torch.testing.assert_close(found[name], t, rtol=0, atol=0)
        assert found[name] is not t
        assert found[name].untyped_storage().nbytes() == t.numel() * t.element_size()


def test_a_tensor_that_the_backend_does_not_take_is_moved() -> None:
    group = object.__new__(Group)
    group._devices = ["cpu"]
    assert group._device_for(torch.ones(1, device="meta")) == torch.device("cpu")
    assert group._device_for(torch.ones(1)) == torch.device("cpu")


def test_a_lost_rank_is_an_error_that_says_what_to_do(
    world: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(dist, "all_reduce", closed)
    with pytest.raises(PergradError, match=r"rank 0 lost another rank.*torchrun.*by peer\)"):
        world.count(1)


def test_of_no_rows_there_are_none(world: Group) -> None:
    assert world.gather(torch.ones(2, 0)).shape == (2, 0)
    assert world.gather(torch.ones(2, 3)).shape == (2, 3)


LOST = """
import os, signal, time
import torch, pergrad
from tests.distributed.ranks import in_ranks

def work(rank):
    model = torch.nn.Linear(3, 2)
    total = pergrad.Sum()
    if SHARDED:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        with pergrad.record(model, total):
            model(torch.ones(4, 3)).sum().backward()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        if SHARDED:
            with pergrad.record(model, total):
                model(torch.ones(4, 3)).sum().backward()
        total.all_reduce()
    except pergrad.PergradError as error:
        return [str(error), time.monotonic() - start]

print(in_ranks(work, 2)[0])
"""


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_with_a_message(is_sharded: bool) -> None:
    output = ranks.output_of("-c", f"SHARDED = {is_sharded}\n{LOST}")
    message, seconds = ast.literal_eval(output.splitlines()[-1])
    assert "rank 0 lost another rank" in message
    assert "torchrun" in message
    assert seconds < 60
