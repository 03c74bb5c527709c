"""Private steps as CUDA graphs: the sums are those of uncompiled steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pergrad.private import Plan, Step

pytestmark = pytest.mark.gpu


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x)[:, 0] - y).square()


def trained(**options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double().cuda()
    plan = Plan(
        noise_multiplier=0.5,
        sample_rate=0.2,
        steps=6,
        max_norm=0.1,
        delta=1e-3,
        expected_batch_size=8,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    step = Step(model, optimizer, losses, plan, 4, generator=generator, **options)  # type: ignore[arg-type]
    data = TensorDataset(torch.randn(40, 5).double().cuda(), torch.randn(40).double().cuda())
    for x, y in plan.loader(data, torch.Generator().manual_seed(2)):
        step(x, y)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_is_that_of_uncompiled_steps(backend: str) -> None:
    for found, wanted in zip(trained(backend=backend, cuda_graphs=True), trained(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
