"""Class 13: losses that are not one for each sample, in the order of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.soundness.judge import Cases, squares

__all__ = ["CASES"]

CASES = Cases()


def clips(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, 2, 3),)


def series(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(5, size, 3),)


@CASES.refused(
    batch=clips, loss_fn=lambda m, v: m(v.flatten(0, 1)).square().sum(1).view(4, 2).sum(1)
)
def frames_summed_to_videos(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.exact(batch=clips, loss_fn=lambda m, v: m(v.flatten(0, 1)).square().sum(1))
def frames_as_samples(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(batch=series, loss_fn=lambda m, x: m(x).square().sum((0, 2)))
def time_first(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(loss_fn=lambda m, x: squares(m, x).flip(0))
def reversed_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(loss_fn=lambda m, x: squares(m, x).repeat_interleave(2))
def losses_twice(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(loss_fn=lambda m, x: squares(m, x).cumsum(0))
def cumulative_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.exact(loss_fn=lambda m, x: torch.stack([row.square().sum() for row in m(x)]))
def stacked_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.exact(loss_fn=lambda m, x: torch.stack([F.mse_loss(row, torch.ones(3)) for row in m(x)]))
def stacked_mean_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@CASES.refused(loss_fn=lambda m, x: torch.stack([row.square().sum() for row in m(x).flip(0)]))
def stacked_losses_reversed(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))
