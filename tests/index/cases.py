"""A small classifier and its data, and the oracle of its gradients, for the tests of the index."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import pergrad
from pergrad.audit import Spec


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def data(size: int = 40, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


def network(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def flat_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Runs a backward pass for each sample; (n, parameters)."""
    found = []
    for n in range(len(x)):
        loss = losses(model, x[n : n + 1], y[n : n + 1]).sum()
        found.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
        )
    return torch.stack(found)


def built(
    path: Any = None, model: Any = None, dataset: Any = None, **options: Any
) -> pergrad.Index:
    given = {
        "projection": "none",
        "dtype": "float64",
        "preconditioner": "none",
        "batch_size": 8,
        "certify": False,
        "chunk": 24,
    }
    return pergrad.Index.build(
        model if model is not None else network(),
        dataset if dataset is not None else data(),
        path,
        losses,
        **{"quiet": True, **given, **options},
    )


def spec() -> Spec:
    """For the command: `tests.index.cases:spec`."""
    return Spec(
        network(),
        data(),
        losses,
        show=lambda item: f"<b>{item[0][0]:.3f}</b>",
        label=lambda item: str(int(item[1])),
    )


def more() -> Spec:
    """For the command: other data of the same model."""
    return Spec(network(), data(8, seed=5), losses)


class Killed(TensorDataset):
    """Ends the process, as kill -9 does, when item `KILL_AT` is read."""

    def __getitem__(self, index: int) -> Any:
        if os.environ.get("KILL_AT") == str(index):
            self.reads = getattr(self, "reads", 0) + 1
            if self.reads == 3:  # the fingerprint of the data reads it twice
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def killed() -> Spec:
    """For other processes: an index of 40 samples that may be killed."""
    return Spec(network(), Killed(*data().tensors), losses)
