"""Sharded parameters, in a job of one rank; two are in tests/distributed/test_sharding.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import pergrad
from pergrad.errors import PergradError, UnseenUseError
from pergrad.testing import loop_grads


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def sharded(model: nn.Module) -> Any:
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return model


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_unsharded_tensors_are_recorded_under_the_names_of_their_parameters() -> None:
    torch.testing.assert_close(
        pergrad.grads(sharded(made()), losses, X), loop_grads(made(), losses, X)
    )


def test_a_step_leaves_no_hook_on_them() -> None:
    model = sharded(made())
    held: list[Tensor] = []
    model.register_forward_hook(lambda *_: held.extend([model[0].weight, model[2].bias]))
    pergrad.norms(model, losses, X)
    assert [type(t) for t in held] == [nn.Parameter] * 2  # unsharded just then
    assert not any(t._backward_hooks or t._post_accumulate_grad_hooks for t in held)
    assert all(p.grad is None for p in (*model.parameters(), *held))


class Unseen(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return super().forward(x)


def test_an_ordinary_gradient_for_one_is_an_error() -> None:
    model = sharded(Unseen(*made()))
    with pytest.raises(PergradError):
        pergrad.norms(model, losses, X)
    model = sharded(made())
    weight: list[Tensor] = []

    def half_seen(model: nn.Module, x: Tensor) -> Tensor:
        found = losses(model, x)
        with torch._C.DisableTorchFunction():
            return found + (weight[0] * 0 + 1).sum()

    model.register_forward_pre_hook(lambda *_: weight.append(model[0].weight))
    with pytest.raises(UnseenUseError, match=r"0\.weight"), pergrad.record(model, pergrad.Norms()):
        half_seen(model, X).sum().backward()


def test_a_hook_on_a_sharded_parameter_is_refused() -> None:
    model = sharded(made())
    model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(PergradError, match=r"'0\.weight' has a hook.*fully_shard"):
        pergrad.norms(model, losses, X)


def test_a_part_of_a_sharded_module_is_refused_with_the_module_to_record() -> None:
    model = sharded(made())
    with pytest.raises(
        PergradError, match=r"'weight' is sharded by fully_shard.*record the module that"
    ):
        pergrad.norms(model[2], lambda head, x: losses(model, x), X)
