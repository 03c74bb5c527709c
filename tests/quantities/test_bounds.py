"""A clipped sum never exceeds its bound, in any dtype: neither in total nor by what one sample adds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.testing import assert_near

BOUND = 0.7
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WAYS: dict[str, dict[str, Any]] = {
    "clip": {},
    "low memory": {"memory": "low"},
    "high memory": {"memory": "high"},
    "normalize": {"weighting": "normalize"},
    "normalize without a constant": {"weighting": "normalize", "stability": 0.0},
}


class Model(nn.Module):
    """A table, a convolution, a norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.LayerNorm(4)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x).mT))


def aligned(samples: int, dtype: torch.dtype) -> Tensor:
    """The same sample over and over: what rounding adds, adds up."""
    return torch.randn(1, 3, 6).to(dtype).repeat(samples, 1, 1)


def random(samples: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(samples, 3, 6).to(dtype)


def clipped(model: nn.Module, x: Tensor, **options: Any) -> pergrad.ClippedSum:
    quantity = pergrad.ClippedSum(options.pop("bound", BOUND), **options)
    with pergrad.record(model, quantity):
        (model(x) * torch.arange(1, 6, dtype=x.dtype)).sum().backward()
    return quantity


def length(result: dict[str, Tensor], pattern: str = "") -> float:
    """The norm over parameters, without a rounding that matters."""
    parts = [t.double().flatten() for name, t in result.items() if name.startswith(pattern)]
    return torch.cat(parts).norm().item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("samples", [1, 8, 1024])
@pytest.mark.parametrize("batch", [aligned, random])
@pytest.mark.parametrize("way", WAYS)
def test_clipped_sum_never_exceeds_its_bound(
    way: str, batch: Callable[..., Tensor], samples: int, dtype: torch.dtype
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = Model().to(dtype)
        result = clipped(model, batch(samples, dtype), **WAYS[way]).result
        assert length(result) <= samples * BOUND
        if batch is aligned and way != "normalize":
            assert length(result) >= samples * BOUND * (1 - 1e-4)  # and is not much below


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_group_stays_within_its_bound(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, bounds = Model().to(dtype), {"conv.*": 0.3, "*": 0.01}
    result = clipped(model, aligned(512, dtype), bound=bounds).result
    assert length(result, "conv") <= 512 * 0.3
    assert length({k: t for k, t in result.items() if "conv" not in k}) <= 512 * 0.01


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_sample_adds_at_most_the_bound(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Model().to(dtype), random(64, dtype)
    tolerance = 1e-15 if dtype is torch.float64 else 1e-6
    for n in range(64):
        assert length(clipped(model, x[n : n + 1]).result) <= BOUND * (1 + tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offload", [False, True])
def test_sums_are_in_float32_or_wider_and_only_assign_rounds(
    dtype: torch.dtype, offload: bool
) -> None:
    torch.manual_seed(0)
    model, x = Model().to(dtype), random(8, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    quantities: list[Any] = [
        pergrad.ClippedSum(BOUND),
        pergrad.SecondMoment(),
        pergrad.Variance(),
        pergrad.NoiseScale(),
    ]
    step = pergrad.compiled(
        model,
        lambda m, x: m(x).float().square().sum((1, 2)),
        *quantities,
        backend="eager",
        offload=offload,
    )
    for _ in range(3):
        step(x)
        for quantity in quantities[:3]:
            assert {t.dtype for t in quantity.result.values()} == {wide}
        sums: Any = quantities[0]
        model.zero_grad()
        sums.assign()
        for name, p in model.named_parameters():
            assert p.grad is not None
            assert p.grad.dtype == dtype
            assert torch.equal(p.grad, sums.result[name].to(dtype))


def test_joined_sums_of_halves_stay_within_the_bound() -> None:
    torch.manual_seed(0)
    model, x = Model().bfloat16(), aligned(256, torch.bfloat16)
    total = clipped(model, x)
    for _ in range(3):
        total += clipped(model, x)
    assert length(total.result) <= 4 * 256 * BOUND
    assert_near(total.norms, clipped(model, x.repeat(4, 1, 1)).norms)
