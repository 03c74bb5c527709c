"""A small private run, for tests of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pergrad.private import Plan, PlanLoader, Step

USUAL: dict[str, Any] = {
    "noise_multiplier": 1.0,
    "sample_rate": 0.2,
    "steps": 6,
    "max_norm": 0.5,
    "expected_batch_size": 8,
}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plan(**changes: Any) -> Plan:
    return Plan(**(USUAL | changes))


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def data(size: int = 40, dtype: torch.dtype = torch.float64) -> TensorDataset:
    drawn = torch.randn(size, 4, dtype=dtype, generator=seeded(1))
    return TensorDataset(drawn, torch.randint(3, (size,), generator=seeded(2)))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 1.0} | options))


def run(
    made: Plan,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Tensor] = losses,
    samples: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> tuple[Step, PlanLoader]:
    model = mlp() if model is None else model
    loader = made.loader(data() if samples is None else samples, seeded())
    options = {"generator": seeded(5)} | options
    step = Step(model, sgd(model) if optimizer is None else optimizer, loss_fn, made, **options)
    return step, loader


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
