"""Models, batches and the oracle of the checks on ranks, all in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pergrad
from pergrad.testing import loop_grads

WIDTH = 4
SPLITS = ("uneven", "none")  # ways to share eight samples among the ranks
_SIZES = {
    ("uneven", 1): (8,),
    ("none", 1): (8,),
    ("uneven", 2): (5, 3),
    ("none", 2): (8, 0),
    ("uneven", 4): (3, 2, 1, 2),
    ("none", 4): (0, 5, 0, 3),
}


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(self.norm(x)).tanh())


class Net(nn.Module):
    """Two residual blocks between two linear layers; its rows are samples."""

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def made(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    """Builds a model with the same random weights on every rank."""
    torch.manual_seed(seed)
    return kind().double()


def batch(size: int = 8, seed: int = 1) -> Tensor:
    """Draws the samples of all ranks."""
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def own(rows: Tensor, split: str = "uneven") -> Tensor:
    """Takes the samples of this rank."""
    return rows.split(_SIZES[split, dist.get_world_size()])[dist.get_rank()]


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(-1)


def recorded(
    model: nn.Module, x: Tensor, *quantities: Any, called: nn.Module | None = None, **options: Any
) -> None:
    """Records a step of a model; `called` is its wrapper, if that is what runs."""
    with pergrad.record(model, *quantities, **options):
        losses(model if called is None else called, x).sum().backward()


def plain_step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Runs a step without pergrad; returns the gradients, gathered where they are sharded."""
    model.zero_grad()
    losses(model, x).sum().backward()
    found: dict[str, Any] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}


def oracle(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Computes per-sample gradients by one backward pass for each sample."""
    return loop_grads(model, losses, x)


def norms_of(grads: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)


def clipped_of(grads: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    scale = (bound / norms_of(grads)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", scale, g) for name, g in grads.items()}


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    size = max(wanted.abs().max().item(), 1.0) if wanted.numel() else 1.0
    apart = (found - wanted).abs().max().item() if wanted.numel() else 0.0
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert apart <= tolerance * size, f"{apart:.1e} apart"


def all_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys(), (list(found), list(wanted))
    for name, want in wanted.items():
        near(found[name], want, tolerance)


def refusal(call: Callable[[], object]) -> str:
    """Returns the message of the error that a call must raise."""
    try:
        call()
    except pergrad.PergradError as error:
        return str(error)
    raise AssertionError("nothing was refused")
