"""Small specs to audit, by reference: `tests.audit.cases:mlp`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.audit import Spec

SIZE = 60


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data(size: int = SIZE, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


def network(*, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def mlp(size: int = SIZE, **changes: Any) -> Spec:
    return Spec(**{"model": network(), "dataset": data(size), "loss": losses, **changes})


mlp_as_it_is = mlp()


def twenty_thousand() -> Spec:
    return mlp(20_000)


class Slow(TensorDataset):
    """Takes its time, so that there is a middle to be killed in."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index)


def slow() -> Spec:
    return mlp(dataset=Slow(*data(400).tensors))


class Dies(Slow):
    """Kills the second process once it reads its second batch."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 2 * 128 + 24 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def one_dies() -> Spec:
    return mlp(dataset=Dies(*data(400).tensors))


def sharded() -> Spec:
    """The slow one on a model that all processes of torchrun share."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network().double()
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    return mlp(model=model, dataset=Slow(*data(400).tensors))


class Interrupts(TensorDataset):
    """Presses Ctrl-C where the environment asks for it, and not yet while the fingerprint is taken."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index == 40 and self.reads > 2 * SIZE and os.environ.get("PRESS_CTRL_C"):
            # A shell may have started this process in the background, where Ctrl-C is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(signal.SIGINT)  # handled before it returns
        return super().__getitem__(index)


def interrupts() -> Spec:
    return mlp(dataset=Interrupts(*data().tensors))


def batch_norm() -> Spec:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return mlp(model=model)


def scalar_loss() -> Spec:
    return mlp(loss=lambda model, x, y: F.cross_entropy(model(x), y))


def unseeded() -> Spec:
    return mlp(model=nn.Sequential(nn.Linear(6, 3)))


class BadItem(TensorDataset):
    """One item is not like the others."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x[:2], y) if index == 17 else (x, y)


def bad_item() -> Spec:
    return mlp(dataset=BadItem(*data().tensors))


not_a_spec = 3


def raises() -> Spec:
    raise KeyError("weights.pt")
