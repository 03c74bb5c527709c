"""A module that fails where it is told to."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FailsBetween"]


def _fail(_: Tensor) -> None:
    raise KeyError("in the backward")


class Fails(torch.autograd.Function):
    """Fails in its own backward, also when the engine tries that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("in the function")


class FailsBetween(nn.Module):
    """Fails where it is told to, once half of the parameters have had their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.fails == "forward":
            raise KeyError("in the forward")
        if self.fails == "backward":
            hidden.register_hook(_fail)
        if self.fails == "function":
            hidden = Fails.apply(hidden)
        return self.last(hidden)
