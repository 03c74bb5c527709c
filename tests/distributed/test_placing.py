"""Cuts of calls with DTensors, in a job of one rank; several are in test_tensor_parallel.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pergrad.distributed.placing import (
    Cutter,
    _part,
    is_sharded,
    refuse_sharded_samples,
    spread_rows,
    whole_of,
)
from pergrad.errors import PergradError
from pergrad.factors import Dense, OuterProduct, RowSum


@pytest.fixture
def mesh() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_plain_tensors_are_whole() -> None:
    t = torch.ones(2)
    assert not is_sharded(t)
    assert whole_of(t) is t


def test_a_chunk_of_a_factor_is_a_chunk_of_its_gradients() -> None:
    torch.manual_seed(0)
    outer = OuterProduct(torch.randn(3, 2, 5), torch.randn(3, 2, 4))
    rows = RowSum(torch.randint(5, (3, 6)), torch.randn(3, 6, 4), 5)
    for factor in (outer, rows, Dense(torch.randn(3, 5, 4))):
        for dim, of in ((0, 2), (0, 4), (1, 3)):
            wanted = factor.materialize().chunk(of, dim + 1)
            for rank in range(of):
                found = _part(factor, dim, of, rank).materialize()
                if rank < len(wanted):
                    torch.testing.assert_close(found, wanted[rank])
                else:
                    assert found.numel() == 0


def test_samples_that_ranks_share_out_are_refused() -> None:
    refuse_sharded_samples(torch.ones(2, 4), torch.ones(2, 2), 0)
    with pytest.raises(PergradError, match=r"sharded along its samples.*fully_shard"):
        refuse_sharded_samples(torch.ones(2, 4), torch.ones(4, 4), 0)


def test_tensors_of_a_call_are_cut_as_the_weight_is(mesh: object) -> None:
    weight = distribute_tensor(torch.randn(4, 3), mesh, [Shard(1)])
    x = distribute_tensor(torch.randn(2, 5, 3), mesh, [Replicate()])
    g = distribute_tensor(torch.randn(2, 5, 4), mesh, [Shard(2)])
    cutter = Cutter(F.linear, "weight", weight)
    grads, kept = cutter.cut([g], {"input": x}, 0)
    assert not any(map(is_sharded, (*grads, *kept.values())))
    factor = OuterProduct(grads[0], kept["input"])
    assert cutter.finish(factor) is factor
    rows = spread_rows(factor.materialize(), weight)
    assert rows.placements == (Shard(2),)
    torch.testing.assert_close(whole_of(rows), factor.materialize())
