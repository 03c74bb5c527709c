"""`fully_shard` on a GPU, in a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pergrad
from pergrad.testing import loop_grads
from tests.distributed.models import all_near, batch, clipped_of, losses, made, near, norms_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model: Any = made().to("cuda", dtype)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=init_device_mesh("cuda", (1,)), **options)
    return model


def whole(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.full_tensor() for name, t in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("memory", ["kept", "low", "high"])
def test_quantities_are_those_of_the_loop(reshards: bool, memory: Any) -> None:
    x = batch().cuda()
    wanted = loop_grads(made().cuda(), losses, x)
    model = sharded(reshard_after_forward=reshards)
    full, norms, total = pergrad.Grads(), pergrad.Norms(), pergrad.Sum()
    clipped = pergrad.ClippedSum(1.0, memory=memory)
    with pergrad.record(model, full, norms, total, clipped):
        losses(model, x).sum().backward()
    all_near(full.result, wanted)
    near(norms.result, norms_of(wanted))
    all_near(whole(total.result), {name: g.sum(0) for name, g in wanted.items()})
    all_near(whole(clipped.result), clipped_of(wanted, 1.0))
    clipped.assign(reduce=True)
    all_near(
        {name: p.grad.full_tensor() for name, p in model.named_parameters()}, whole(clipped.result)
    )
    model.zero_grad()
    losses(model, x).sum().backward()
    plain = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    all_near(plain, {name: g.sum(0) for name, g in wanted.items()})


def test_offloaded_shards_get_gradients_where_they_are() -> None:
    x = batch().cuda()
    model = sharded(offload_policy=CPUOffloadPolicy())
    clipped = pergrad.ClippedSum(1.0)
    with pergrad.record(model, clipped):
        losses(model, x).sum().backward()
    assert clipped.norms.is_cuda
    clipped.assign(reduce=True)
    wanted = clipped_of(loop_grads(made().cuda(), losses, x), 1.0)
    for name, p in model.named_parameters():
        assert p.grad.to_local().device.type == "cpu"
        near(p.grad.to_local().cuda(), wanted[name])


def test_a_mixed_precision_policy_gives_norms_of_its_gradients() -> None:
    x = batch().cuda().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(torch.float32, mp_policy=policy)
    full, norms = pergrad.Grads(), pergrad.Norms()
    with pergrad.record(model, full, norms):
        losses(model, x).sum().backward()
    near(norms.result, norms_of(full.result), 2e-3)


def test_sharded_gradients_are_proved() -> None:
    x, model = batch().cuda(), sharded()
    assert pergrad.certify(model, losses, x, quiet=True).ok
    assert pergrad.verify(model, losses, x, quiet=True).ok
    near(pergrad.norms(model, losses, x), norms_of(loop_grads(made().cuda(), losses, x)))


def test_tensor_parallel_quantities_are_those_of_the_loop() -> None:
    x = batch().cuda()
    wanted = loop_grads(made().cuda(), losses, x)
    styles = {"blocks.0.wide": ColwiseParallel(), "blocks.0.narrow": RowwiseParallel()}
    model = parallelize_module(made().cuda(), init_device_mesh("cuda", (1,)), styles)
    norms, clipped = pergrad.Norms(), pergrad.ClippedSum(1.0)
    with pergrad.record(model, norms, clipped):
        losses(model, x).sum().backward()
    near(norms.result, norms_of(wanted))
    found = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in clipped.result.items()}
    all_near(found, clipped_of(wanted, 1.0))
