"""Defines losses that are functions of a classifier's logits, so that one forward pass serves twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["LossOfLogits"]


class LossOfLogits:
    """loss(model, *batch) = criterion(logits(model, *batch), *batch), with the logits at hand.

    With this loss, and its `logits` as those of the spec, an audit computes the gradients of the loss and the
    label-free gradients from one forward pass instead of two.

    Args:
        logits: called as logits(model, *batch); returns (B, classes).
        criterion: called as criterion(logits, *batch); returns the (B,) losses.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> loss = LossOfLogits(
    ...     lambda model, x, y: model(x),
    ...     lambda logits, x, y: F.cross_entropy(logits, y, reduction="none"),
    ... )
    >>> loss(torch.nn.Linear(2, 3), torch.randn(4, 2), torch.tensor([0, 1, 2, 0])).shape
    torch.Size([4])
    """

    def __init__(self, logits: Callable[..., Tensor], criterion: Callable[..., Tensor]) -> None:
        self.logits = logits
        self.of_logits = criterion

    def __call__(self, model: nn.Module, *batch: Any) -> Tensor:
        return self.of_logits(self.logits(model, *batch), *batch)
