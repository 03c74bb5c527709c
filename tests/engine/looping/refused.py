"""A model that is refused although its samples do not meet, and the same one that is not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

SIZE, D, OUT = 5, 4, 3


class Net(nn.Module):
    """Has a tied, a derived and a frozen weight, and a buffer that each call changes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.middle = weight_norm(nn.Linear(D, D))
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.last = nn.Linear(D, OUT)
        self.unused = nn.Parameter(torch.ones(2))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.frozen(self.middle(self.first(x))))
        return self.last(self.dropout(hidden + F.linear(x, self.first.weight)))


def refused(model: nn.Module) -> Any:
    """A copy with a backward hook that returns gradients, as they are: no recording follows it."""
    copied = copy.deepcopy(model)
    layer = next(m for m in copied.modules() if isinstance(m, nn.Linear))
    layer.register_full_backward_hook(lambda m, of_input, of_output: of_input)
    return copied


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def batch(size: int = SIZE) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, D, dtype=torch.float64, requires_grad=True)  # for the hook
    return x, torch.arange(size) % OUT
