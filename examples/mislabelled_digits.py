"""Find mislabelled training samples by the size of their gradients.

A sample that still pulls hard on the weights of a model that has learned the rest is one that the
model disagrees with: often its label is wrong. This script flips a known share of the labels of
scikit-learn's digits, trains a small convnet for a few epochs (long enough to learn the digits, too
short to memorise the flips), and ranks all training samples by the norm of their own gradient. The
flips are known, so that it can grade itself: against chance, and against ranking by the loss alone,
which needs no gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad

CLASSES = 10
SHARES = (0.05, 0.10)  # how far down the ranking the flips are counted


@dataclass(frozen=True)
class Digits:
    """Images, the labels that training sees, and the labels that are right."""

    images: Tensor  # (n, 1, 8, 8)
    given: Tensor  # (n,)
    true: Tensor  # (n,)

    @property
    def flipped(self) -> Tensor:  # (n,) bool
        return self.given != self.true

    def __len__(self) -> int:
        return len(self.given)


def digits_with_flips(share: float, seed: int) -> Digits:
    """Load the digits and give round(share * n) of them, drawn by seed, another label."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    true = torch.from_numpy(bunch.target).long()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(true), generator=generator)[: round(share * len(true))]
    given = true.clone()
    # An offset of 1 to 9 never leads back to the label itself.
    offsets = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
    given[chosen] = (true[chosen] + offsets) % CLASSES
    return Digits(images, given, true)


def convnet(seed: int) -> nn.Module:
    """Two convolutions with GroupNorm: unlike BatchNorm, it keeps the samples apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, CLASSES),
        )


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (n,)
    return F.cross_entropy(model(images), labels, reduction="none")


def training(model: nn.Module, digits: Digits, *, epochs: int, seed: int) -> Iterator[float]:
    """Train on the given labels and yield the mean loss of each epoch as it ends."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # A falling rate settles the weights: at a constant one the ranking jumps from epoch to epoch.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(digits), generator=generator).split(64):
            optimizer.zero_grad()
            batch = losses(model, digits.images[rows], digits.given[rows])
            batch.mean().backward()
            optimizer.step()
            total += float(batch.detach().sum())
        schedule.step()
        yield total / len(digits)


def gradient_norms(model: nn.Module, digits: Digits, *, batch_size: int = 256) -> Tensor:  # (n,)
    """|g_n| over all parameters, where g_n is the gradient of the loss of sample n alone."""
    norms = []
    for rows in torch.arange(len(digits)).split(batch_size):
        grads = pergrad.grads(model, losses, digits.images[rows], digits.given[rows])
        by_parameter = [grad.flatten(1).norm(dim=1) for grad in grads.values()]
        norms.append(torch.stack(by_parameter).norm(dim=0))
    return torch.cat(norms)


def flips_on_top(scores: Tensor, flipped: Tensor, share: float) -> tuple[int, int]:
    """(Flipped samples among the highest scores, how many samples that are)."""
    size = round(share * len(scores))
    return int(flipped[scores.topk(size).indices].sum()), size


def largest(digits: Digits, predicted: Tensor, norms: Tensor, *, top: int) -> Table:
    """List the samples with the largest gradient norms."""
    table = Table(title=f"The {top} largest of {len(digits)} per-sample gradient norms")
    for heading in ("index", "given label", "true label", "predicted", "gradient norm"):
        table.add_column(heading, justify="right")
    table.add_column("flipped?")
    for row in norms.topk(top).indices.tolist():
        columns = (digits.given, digits.true, predicted)
        labels = [str(int(column[row])) for column in columns]
        verdict = "yes" if digits.flipped[row] else "no"
        table.add_row(str(row), *labels, f"{norms[row]:.2f}", verdict)
    return table


def grade(digits: Digits, norms: Tensor, sample_losses: Tensor) -> Table:
    """Count the flips near the top, beside what chance and the loss alone find."""
    flips = int(digits.flipped.sum())
    table = Table(title=f"Flipped labels found, of {flips} ({flips / len(digits):.1%} of the data)")
    for heading in ("ranked highest", "by gradient norm", "by loss alone", "by chance"):
        table.add_column(heading, justify="right")
    for share in SHARES:
        by_norm, size = flips_on_top(norms, digits.flipped, share)
        by_loss, _ = flips_on_top(sample_losses, digits.flipped, share)
        by_chance = size * flips / len(digits)
        table.add_row(f"{share:.0%} ({size})", str(by_norm), str(by_loss), f"{by_chance:.1f}")
    return table


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text}")
    return value


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of flips, weights and batches")
    parser.add_argument("--flipped", type=share, default=0.05, help="share of labels to flip")
    parser.add_argument("--epochs", type=count, default=10, help="more of them memorise the flips")
    parser.add_argument("--top", type=count, default=15, help="samples to list")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    console = Console()
    digits = digits_with_flips(chosen.flipped, chosen.seed)
    model = convnet(chosen.seed)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    loss_column = TextColumn("mean loss {task.fields[loss]:.3f}")
    with Progress(*columns, loss_column, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=chosen.epochs, loss=float("nan"))
        for loss in training(model, digits, epochs=chosen.epochs, seed=chosen.seed):
            progress.update(task, advance=1, loss=loss)

    norms = gradient_norms(model, digits)
    with torch.no_grad():
        predicted = model(digits.images).argmax(dim=1)
        sample_losses = losses(model, digits.images, digits.given)
    console.print(largest(digits, predicted, norms, top=min(chosen.top, len(digits))))
    console.print(grade(digits, norms, sample_losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
