"""Train on digits with differential privacy, stop in the middle, resume, and tell what was spent.

One `Plan` makes the batches, the noise and the account. The noise is calibrated to `--epsilon`; every step is
written to a ledger before it is made. Half-way, the run is thrown away and resumed from its checkpoint: the
result is the same to the last bit, and no step is counted twice. At the end the accuracy on unseen digits is
compared with training without privacy.

Run it with `python examples/private_training.py`; it takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pergrad.private import Plan, Released, Step

TRAIN = 1437
DELTA = 1e-5


def data() -> tuple[TensorDataset, TensorDataset]:
    """Returns digits for training and for testing, (n, 64) of length one."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.data).float()
    images = F.normalize(images - images.mean(1, keepdim=True))
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss for each sample: a mean would depend on the size of the batch, which is private."""
    return F.cross_entropy(model(x), y, reduction="none")


def new_run(plan: Plan, train: TensorDataset, folder: Path) -> tuple[nn.Module, Step]:
    """Makes model, optimizer and step, as a program does whenever it starts."""
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=16.0)
    step = Step(model, optimizer, losses, plan, ledger=folder / "ledger.jsonl")
    checkpoint = folder / "run.pt"  # as secret as the data: it holds the key of the noise
    if checkpoint.exists():
        step.load(checkpoint)
    else:
        step.save(checkpoint)
    return model, step


def train_privately(
    plan: Plan, train: TensorDataset, folder: Path, stop: int | None = None
) -> tuple[nn.Module, Released | None]:
    """Trains to the end of the plan, or up to a step; goes on where the last call ended."""
    loader = plan.loader(train)
    model, step = new_run(plan, train, folder)
    released = None
    for batch in loader:
        released = step(*batch)
        if released.step == stop:
            step.save(folder / "run.pt")
            break
    return model, released


def train_plainly(train: TensorDataset, steps: int) -> nn.Module:
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=16.0)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(model, *train.tensors).mean().backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=720, help="expected size of a batch")
    chosen = parser.parse_args(arguments)
    train, test = data()
    plan = Plan.calibrate(
        epsilon=chosen.epsilon,
        delta=DELTA,
        sample_rate=chosen.batch_size / TRAIN,
        steps=chosen.steps,
        max_norm=0.5,
        population=TRAIN,
    )
    table = Table(title=f"noise multiplier {plan.noise_multiplier:.3f}, delta {DELTA:g}")
    for heading in ("training", "steps", "epsilon spent", "accuracy"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as name:
        for title, stop in (("interrupted", chosen.steps // 2), ("resumed", None)):
            model, released = train_privately(plan, train, Path(name), stop)
            assert released is not None
            spent = f"{released.epsilon:.3f}"
            table.add_row(title, str(released.step), spent, f"{accuracy(model, test):.1%}")
    plain = accuracy(train_plainly(train, chosen.steps), test)
    table.add_row("not private", str(chosen.steps), "∞", f"{plain:.1%}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
