"""Train with clipped per-sample gradients, so that a few outliers cannot spoil the fit.

A linear model is fitted to data in which a few samples have a huge, wrong target. In plain SGD the pull of
each of them grows with its error. Here the gradient of every sample is clipped to a norm of at most
`--max-norm` before the gradients are added up, which bounds the effect of each sample: `pergrad.ClippedSum`
in the training loop, `assign()`, and an ordinary optimizer. Both fits are graded on clean samples that
neither has seen.

This alone is not differential privacy: that needs noise added to the sum, batches drawn at random as its
proofs assume, and an accountant for the privacy budget.

Run it with `python examples/clipping.py`; it takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad

FEATURES = 10
NOISE = 0.1  # standard deviation of clean targets: its square is the smallest possible loss


class Data(NamedTuple):
    x: Tensor  # (n, features)
    y: Tensor  # (n, 1)
    corrupted: Tensor  # (n,) bool


class Epoch(NamedTuple):
    test_loss: float
    clipped: Tensor  # (n,) bool, in the order of the data


def regression(samples: int, corrupted: int, seed: int) -> tuple[Data, Data]:
    """Returns (training data with `corrupted` huge targets, clean test data of the same size)."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(FEATURES, 1, generator=generator)
    x = torch.randn(2 * samples, FEATURES, generator=generator)
    y = x @ truth + NOISE * torch.randn(2 * samples, 1, generator=generator)
    wild = torch.zeros(2 * samples, dtype=torch.bool)
    wild[torch.randperm(samples, generator=generator)[:corrupted]] = True
    y[wild] = 1000.0
    return Data(*(t[:samples] for t in (x, y, wild))), Data(*(t[samples:] for t in (x, y, wild)))


def training(
    train: Data, test: Data, *, max_norm: float | None, epochs: int, batch_size: int, seed: int
) -> Iterator[Epoch]:
    """Runs SGD from zero weights, on clipped gradients or, without a bound, on plain ones."""
    model = nn.Linear(FEATURES, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    # Gradients are sums over the batch: dividing the learning rate makes them means.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / batch_size)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        is_clipped = torch.zeros(len(train.x), dtype=torch.bool)
        for rows in torch.randperm(len(train.x), generator=generator).split(batch_size):
            optimizer.zero_grad()
            if max_norm is None:
                F.mse_loss(model(train.x[rows]), train.y[rows], reduction="sum").backward()
            else:
                with pergrad.record(model, pergrad.ClippedSum(max_norm)) as clipped:
                    F.mse_loss(model(train.x[rows]), train.y[rows], reduction="sum").backward()
                clipped.assign()
                is_clipped[rows] = clipped.norms > max_norm
            optimizer.step()
        with torch.no_grad():
            test_loss = float(F.mse_loss(model(test.x), test.y))
        yield Epoch(test_loss, is_clipped)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--corrupted", type=int, default=10, help="samples with a huge target")
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="bound on each sample's gradient"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    chosen = parser.parse_args(arguments)
    train, test = regression(chosen.samples, chosen.corrupted, chosen.seed)

    def run(max_norm: float | None) -> Iterator[Epoch]:
        sizes = {"epochs": chosen.epochs, "batch_size": chosen.batch_size, "seed": chosen.seed}
        return training(train, test, max_norm=max_norm, **sizes)

    table = Table(
        title=f"Loss on clean samples; {chosen.corrupted} of {len(train.x)} are corrupted"
    )
    for heading in (
        "epoch",
        "plain SGD",
        "clipped",
        "samples clipped",
        f"of the {chosen.corrupted} corrupted",
    ):
        table.add_column(heading, justify="right")
    for number, (plain, clipped) in enumerate(zip(run(None), run(chosen.max_norm), strict=True), 1):
        share = f"{clipped.clipped.float().mean():.0%}"
        caught = f"{int(clipped.clipped[train.corrupted].sum())}"
        table.add_row(
            str(number), f"{plain.test_loss:.3f}", f"{clipped.test_loss:.3f}", share, caught
        )
    console = Console()
    console.print(table)
    console.print(f"The best possible loss is {NOISE**2:.3f}, the noise of the clean targets.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
