"""Small tasks whose answers are known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.evaluate import Task, Trainer


class Mean(nn.Module):
    """Predicts the mean of its training samples."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)


def mean_task(noise: float = 0.0, count: int = 12) -> Task:
    """The mean of numbers: for queries far away the exact score of a sample is its signed number."""
    x = torch.arange(float(count))[:, None]

    def train(indices: Tensor, seed: int) -> nn.Module:
        drawn = torch.randn((), generator=torch.Generator().manual_seed(seed))
        return Mean(x[indices].mean() + noise * drawn)

    queries = TensorDataset(torch.tensor([[-100.0], [100.0], [200.0]]))
    return Task(train, TensorDataset(x), queries, lambda model, x: (model.value - x[:, 0]).square())


def exact_scores(task: Task) -> Tensor:
    x = task.dataset.tensors[0][:, 0]
    return torch.stack([-x, x, x])


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def blobs(count: int = 60, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % classes
    centres = 3 * torch.randn(classes, 4, generator=torch.Generator().manual_seed(7))
    return centres[y] + torch.randn(count, 4, generator=generator), y


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def blob_task(epochs: int = 5, checkpoints: int = 1, y: Tensor | None = None) -> Task:
    x, labels = blobs()
    labels = labels if y is None else y
    queries = blobs(9, seed=1)
    train = Trainer(
        network, losses, (x, labels), epochs=epochs, batch_size=16, checkpoints=checkpoints
    )
    return Task(train, TensorDataset(x, labels), TensorDataset(*queries), losses)
