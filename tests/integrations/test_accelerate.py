"""A loop of Accelerate with per-sample clipping trains the weights of a loop written by hand."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pergrad.integrations.accelerate import PerSample

BOUND = 0.8


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def data(dtype: torch.dtype = torch.float64, count: int = 22) -> TensorDataset:
    torch.manual_seed(0)
    x, y = torch.randn(22, 3).to(dtype), torch.randint(4, (22,))
    return TensorDataset(x[:count], y[:count])


def trained_by_hand(model: nn.Module, groups: list[list[int]], bound: float | None) -> list[Tensor]:
    """Steps on the mean of the clipped gradients of each group of samples, computed one by one."""
    x, y = data(next(model.parameters()).dtype).tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    parameters = list(model.parameters())
    for rows in groups:
        totals = [torch.zeros_like(p) for p in parameters]
        for row in rows:
            loss = F.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
            own = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.square().sum() for g in own]).sum().sqrt()
            factor = 1.0 if bound is None else min(1.0, bound / float(norm))
            totals = [t + factor * g for t, g in zip(totals, own, strict=True)]
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total / len(rows)
        optimizer.step()
    return parameters


def trained(
    accelerator: Accelerator, model: nn.Module, bound: float | None, count: int = 22
) -> nn.Module:
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(data(dtype, count), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    per_sample = PerSample(accelerator, model, bound)
    for x, y in loader:
        with accelerator.accumulate(model):
            with per_sample:
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert per_sample.norms is not None
    assert per_sample.metrics["sample_grad_norm_max"] > 0
    return model


# 22 samples in batches of 4, the last one of 2; Accelerate steps at the end of the loader, too.
GROUPS = {
    1: [[*range(k, min(k + 4, 22))] for k in range(0, 22, 4)],
    2: [[*range(k, min(k + 8, 22))] for k in range(0, 22, 8)],
    4: [[*range(16)], [*range(16, 22)]],
}


@pytest.mark.parametrize("steps", GROUPS)
def test_weights_are_those_of_a_loop_by_hand(steps: int) -> None:
    by_hand = trained_by_hand(small_model(), GROUPS[steps], BOUND)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = trained(accelerator, small_model(), BOUND)
    torch.testing.assert_close(list(model.parameters()), by_hand, rtol=1e-9, atol=1e-9)


def test_logging_alone_changes_no_bit_of_the_weights() -> None:
    model, plain = small_model(), small_model()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    trained(accelerator, model, None)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    optimizer, loader = accelerator.prepare(optimizer, DataLoader(data(), batch_size=4))
    for x, y in loader:
        with accelerator.accumulate(plain):
            accelerator.backward(F.cross_entropy(plain(x), y))
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_factor_of_a_gradient_scaler_is_undone() -> None:
    by_hand = trained_by_hand(small_model(), GROUPS[2], BOUND)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = trained(accelerator, small_model(), BOUND)
    torch.testing.assert_close(list(model.parameters()), by_hand, rtol=1e-6, atol=1e-6)


def test_bfloat16_autocast_trains_close_to_float32() -> None:
    start = small_model(torch.float32)
    by_hand = trained_by_hand(copy.deepcopy(start), GROUPS[1], BOUND)
    model = trained(Accelerator(cpu=True, mixed_precision="bf16"), start, BOUND)
    torch.testing.assert_close(list(model.parameters()), by_hand, rtol=0.05, atol=0.02)


def test_error_leaves_the_loop_usable() -> None:
    accelerator = Accelerator(cpu=True)
    model = small_model()
    per_sample = PerSample(accelerator, model, BOUND)
    x, y = data().tensors
    with pytest.raises(RuntimeError, match="shapes"), per_sample:
        model(x[:, 1:])
    with per_sample:
        accelerator.backward(F.cross_entropy(model(x), y))
    assert per_sample.norms is not None
    assert len(per_sample.norms) == 22
