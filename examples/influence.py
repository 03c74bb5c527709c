"""Find the training samples that push the prediction for one test sample, and their direction.

A step of SGD on training sample n changes the loss of a test sample by -rate * <g_n, g_test>, to first order:
a positive inner product helps, a negative one harms (TracIn, Pruthi et al., 2020, at a single checkpoint).
This script trains a small classifier on scikit-learn's digits, takes the test digit with the largest loss,
and lists the training digits that push it hardest. `pergrad.Dots` computes the inner products of a batch
without holding any sample's gradient; `+=` joins the batches. Each estimate is compared with a real step on
that sample alone.

Run it with `python examples/influence.py`; it takes a few seconds.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad

RATE = 1e-3  # learning rate of the step


class Digits(NamedTuple):
    images: Tensor  # (n, 64)
    labels: Tensor  # (n,)


def split(samples: int, seed: int) -> tuple[Digits, Digits]:
    """Returns (`samples` digits for training, the other digits)."""
    bunch = load_digits()
    images, labels = (
        torch.from_numpy(bunch.data).float() / 16,
        torch.from_numpy(bunch.target).long(),
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:samples], order[samples:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (n,)
    return F.cross_entropy(model(images), labels, reduction="none")


def trained(train: Digits, *, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(train.labels)).split(64):
            optimizer.zero_grad()
            losses(model, train.images[rows], train.labels[rows]).mean().backward()
            optimizer.step()
    return model


def influences(model: nn.Module, train: Digits, sample: Digits, *, batch_size: int) -> Tensor:
    """Returns <g_n, g_test> for every training sample n, (n,)."""
    parameters = dict(model.named_parameters())
    test_loss = losses(model, *sample).sum()
    grads = torch.autograd.grad(test_loss, list(parameters.values()))
    direction = dict(zip(parameters, grads, strict=True))
    dots = pergrad.Dots(direction)
    for rows in torch.arange(len(train.labels)).split(batch_size):
        with pergrad.record(model, pergrad.Dots(direction)) as some:
            losses(model, train.images[rows], train.labels[rows]).sum().backward()
        dots += some
    return dots.result


def drop_after_step(model: nn.Module, one: Digits, sample: Digits) -> float:
    """Returns the decrease of the test loss in one real step of SGD on one training sample."""
    stepped = copy.deepcopy(model)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=RATE)
    optimizer.zero_grad()
    losses(stepped, *one).sum().backward()
    optimizer.step()
    with torch.no_grad():
        return float(losses(model, *sample) - losses(stepped, *sample))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1200, help="training samples")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=256, help="batch size of the inner products"
    )
    parser.add_argument("--top", type=int, default=6, help="samples to list on each side")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    chosen = parser.parse_args(arguments)
    train, test = split(chosen.samples, chosen.seed)
    model = trained(train, epochs=chosen.epochs, seed=chosen.seed)
    with torch.no_grad():
        worst = int(losses(model, *test).argmax())
        predicted = model(test.images).argmax(1)
    sample = Digits(test.images[worst : worst + 1], test.labels[worst : worst + 1])
    scores = influences(model, train, sample, batch_size=chosen.batch_size)

    console = Console()
    console.print(f"test accuracy {(predicted == test.labels).float().mean():.1%}")
    console.print(
        f"test digit {worst} is a {int(sample.labels)}, taken for a {int(predicted[worst])}"
    )
    for title, order in (("for", scores.argsort(descending=True)), ("against", scores.argsort())):
        table = Table(title=f"Training digits that push {title} the right answer")
        for heading in ("index", "label", "estimated drop of the loss", "after a real step"):
            table.add_column(heading, justify="right")
        for row in order[: chosen.top].tolist():
            one = Digits(train.images[row : row + 1], train.labels[row : row + 1])
            real = drop_after_step(model, one, sample)
            table.add_row(
                str(row), str(int(one.labels)), f"{RATE * scores[row]:+.5f}", f"{real:+.5f}"
            )
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
