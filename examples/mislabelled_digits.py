"""Find mislabelled training samples: train, audit, and open the report.

This script flips a known share of the labels of scikit-learn's digits and trains a small convnet until it has
learnt most of the flips by heart: their loss is as low as any. Then it audits the model. Label-free gradients
say how a sample moves the model, whatever its label; a label that the other samples would not have given is
doubted. Because the flips are known, the ranking is graded against chance and against ranking by loss alone,
which does not find what the model has learnt by heart.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.audit import AuditOptions, LossOfLogits, Spec, run_audit
from pergrad.reports import overview, write_report
from pergrad.reports.reading import read_results

CLASSES = 10
EPOCHS = 40
OUTPUT = Path("build/demo")


@dataclass(frozen=True)
class Digits:
    """Images, the labels used in training, and the right labels."""

    images: Tensor  # (n, 1, 8, 8)
    given: Tensor  # (n,)
    true: Tensor  # (n,)

    @property
    def flipped(self) -> Tensor:  # (n,) bool
        return self.given != self.true

    def __len__(self) -> int:
        return len(self.given)


def digits_with_flips(share: float, seed: int) -> Digits:
    """Loads the digits and flips round(share * n) random labels."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    true = torch.from_numpy(bunch.target).long()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(true), generator=generator)[: round(share * len(true))]
    given = true.clone()
    # An offset of 1 to 9 modulo 10 always changes the label.
    offsets = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
    given[chosen] = (true[chosen] + offsets) % CLASSES
    return Digits(images, given, true)


def convnet(seed: int) -> nn.Module:
    """Builds the layers of PyTorch's MNIST example, with GroupNorm: unlike BatchNorm, it mixes no samples."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: dict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            norm1=nn.GroupNorm(4, 32),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            norm2=nn.GroupNorm(4, 64),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            hidden=nn.Linear(64 * 4 * 4, 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, CLASSES),
        )
        return nn.Sequential(OrderedDict(layers))


def logits(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (n, classes)
    return model(images)


def cross_entropy(out: Tensor, labels: Tensor) -> Tensor:  # (n,)
    return F.cross_entropy(out, labels, reduction="none")


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (n,)
    return cross_entropy(model(images), labels)


def training(model: nn.Module, digits: Digits, *, epochs: int, seed: int) -> Iterator[float]:
    """Trains on the given labels and yields the mean loss of each epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # With a constant learning rate the ranking would change much from epoch to epoch.
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


def spec_of(model: nn.Module, digits: Digits) -> Spec:
    """Returns the spec of the audit: the model, the training data, and how to show a sample."""
    flipped = digits.flipped.nonzero()[:, 0].tolist()
    return Spec(
        model=model,
        dataset=TensorDataset(digits.images, digits.given),
        loss=LossOfLogits(logits, lambda out, images, labels: cross_entropy(out, labels)),
        logits=logits,
        target=lambda images, labels: labels,
        show=lambda item: item[0],
        label=lambda item: str(int(item[1])),
        known_wrong=flipped or None,
        name=f"scikit-learn digits, {len(flipped)} of {len(digits):,} labels flipped",
    )


def grade_table(grade: dict[str, Any]) -> Table:
    """Returns a table of the flips near the top of the ranking, against loss alone and chance."""
    table = Table(title=f"Flipped labels found, of {grade['known']}")
    for heading in ("in the", "by gradients", "by loss alone", "by chance"):
        table.add_column(heading, justify="right")
    for row in grade["within"]:
        found, by_loss = (
            f"{n} ({n / grade['known']:.1%})" for n in (row["found"], row["found_by_loss"])
        )
        chance = f"{row['share'] * grade['known']:.1f}"
        table.add_row(f"top {row['share']:.0%} ({row['size']})", found, by_loss, chance)
    precision = (grade["average_precision"], grade["average_precision_by_loss"])
    table.add_row("average precision", *(f"{value:.4f}" for value in precision), "")
    return table


def labels_named(folder: Path, digits: Digits) -> tuple[int, int]:
    """Counts (flipped samples for which the others suggest the right label, flipped samples)."""
    results = read_results(folder)
    flipped = digits.flipped.nonzero()[:, 0].tolist()
    named = [results.text("suggested", index) == str(int(digits.true[index])) for index in flipped]
    return sum(named), len(flipped)


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
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--flipped", type=share, default=0.05, help="share of labels to flip")
    parser.add_argument(
        "--epochs", type=count, default=EPOCHS, help="training epochs; many memorize the flips"
    )
    parser.add_argument("--output", type=Path, help=f"results folder; default: {OUTPUT}, replaced")
    return parser.parse_args(argv)


def trained(digits: Digits, *, epochs: int, seed: int, console: Console) -> nn.Module:
    """Returns a convnet trained on the given labels; shows progress on the console."""
    model = convnet(seed)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    loss_column = TextColumn("mean loss {task.fields[loss]:.3f}")
    with Progress(*columns, loss_column, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=epochs, loss=float("nan"))
        for loss in training(model, digits, epochs=epochs, seed=seed):
            progress.update(task, advance=1, loss=loss)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    console = Console()
    folder = chosen.output or OUTPUT
    if chosen.output is None and (folder / "audit.json").exists():
        shutil.rmtree(folder)  # from an earlier demo; a folder given by --output is never removed
    digits = digits_with_flips(chosen.flipped, chosen.seed)
    model = trained(digits, epochs=chosen.epochs, seed=chosen.seed, console=console)
    given = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "examples/mislabelled_digits.py", *given])
    spec, audited = spec_of(model, digits), AuditOptions(seed=chosen.seed)
    summary = run_audit(spec, folder, audited, command=command)
    report = write_report(folder)
    if "grade" in summary:
        console.print(grade_table(summary["grade"]))
    named, shown = labels_named(folder, digits)
    if shown:
        console.print(
            f"For {named} of the {shown} flipped labels, the other samples suggest the right one.\n"
        )
    console.print(overview(folder))
    console.print(f"\nOpen the report in a browser: {report.resolve().as_uri()}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
