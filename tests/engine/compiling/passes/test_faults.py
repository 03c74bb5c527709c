"""A compiled step has torch's numbers where the compiler's own are wrong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.testing import assert_near, loop_grads

POOLS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "larger than the image": (nn.AvgPool2d(8, ceil_mode=True), (2, 2)),
    "overhanging": (nn.AvgPool2d(3, stride=2, ceil_mode=True), (6, 5)),
    "overhanging and padded": (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (6, 6)),
    "with another divisor": (nn.AvgPool2d(3, stride=2, ceil_mode=True, divisor_override=5), (6, 6)),
    "without padding": (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (6, 6)),
    "in the image": (nn.AvgPool2d(2), (6, 6)),
    "of a line": (nn.AvgPool1d(3, stride=2, ceil_mode=True), (6,)),
    "of powers": (nn.LPPool2d(2, 3, stride=2, ceil_mode=True), (6, 6)),
    "of a volume": (nn.AvgPool3d(3, stride=2, ceil_mode=True), (6, 5, 4)),
}


class Pooled(nn.Module):
    def __init__(self, pool: nn.Module, dims: int) -> None:
        super().__init__()
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.pool, self.last = kind(2, 3, 1), pool, kind(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x).sigmoid()))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_averages_over_windows_are_those_of_the_loop(name: str) -> None:
    pool, sizes = POOLS[name]
    torch.manual_seed(0)
    model, x = Pooled(pool, len(sizes)).double(), torch.randn(3, 2, *sizes, dtype=torch.float64)
    grads = pergrad.Grads()
    step = pergrad.compiled(model, losses, grads)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
        step(x)
    assert step.graphs == 1
    for of, g in loop_grads(model, losses, x).items():
        assert_near(grads.result[of], g, of)
