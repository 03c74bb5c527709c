"""Choose a batch size by the gradient noise scale, at several stages of training.

The noise scale tr(Σ) / |G|² (McCandlish et al., 2018) is about the number of samples from which their mean
gradient is more signal than noise: a step on B samples makes about B / (B + noise scale) of the progress of a
step on all of them. Much smaller batches waste steps, much larger ones waste samples. It is small while the
samples agree on the direction, and grows as they disagree.

This script trains a small classifier on scikit-learn's digits with `pergrad.NoiseScale` in the loop.
`.running` is the estimate from small batches, as in real training; the noise scale of all samples at once, by
`+=`, is printed for comparison. The two agree well while the noise scale is not much larger than the batch.
Late in training the mean gradient nearly vanishes in the noise and changes from step to step: the estimate is
then good for an order of magnitude, or negative, which only means that larger batches are needed.

Run it with `python examples/batch_size.py`; it takes a few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad


class Stage(NamedTuple):
    step: int
    loss: float
    running: float
    whole: float


def losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:  # (n,)
    return F.cross_entropy(model(images), labels, reduction="none")


def whole_noise(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Returns (mean loss, noise scale) of all samples at the current weights."""
    noise, total = pergrad.NoiseScale(), 0.0
    for some_images, some_labels in zip(images.split(256), labels.split(256), strict=True):
        with pergrad.record(model, pergrad.NoiseScale()) as some:
            loss = losses(model, some_images, some_labels).sum()
            loss.backward()
        noise += some
        total += float(loss.detach())
    return total / len(labels), noise.result


def training(
    images: Tensor, labels: Tensor, *, batch_size: int, steps: Sequence[int], seed: int
) -> Iterator[Stage]:
    """Trains by SGD on random batches; yields the measurements after each of the given steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / batch_size)
    generator = torch.Generator().manual_seed(seed)
    running = pergrad.NoiseScale(decay=0.98)
    for step in range(1, max(steps) + 1):
        rows = torch.randint(len(labels), (batch_size,), generator=generator)
        # Parameters get no `.grad` in the block, so the plain sum (all weights one) is computed for the step.
        plain_sum = pergrad.ClippedSum(weighting=torch.ones_like)
        with pergrad.record(model, running, plain_sum):
            losses(model, images[rows], labels[rows]).sum().backward()
        plain_sum.assign()
        optimizer.step()
        if step in steps:
            loss, whole = whole_noise(model, images, labels)
            yield Stage(step, loss, running.running, whole)


def power_of_two(noise_scale: float) -> int | None:
    """Returns the power of two nearest to the noise scale; None if the batches were too small."""
    if noise_scale <= 0:
        return None
    return 2 ** max(0, round(torch.tensor(noise_scale).log2().item()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of the training")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 100, 200, 400, 800])
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    chosen = parser.parse_args(arguments)
    bunch = load_digits()
    images, labels = (
        torch.from_numpy(bunch.data).float() / 16,
        torch.from_numpy(bunch.target).long(),
    )
    table = Table(title=f"Noise scale while training on batches of {chosen.batch_size}")
    gets = f"a step on {chosen.batch_size} gets"
    for heading in ("step", "loss", "running", "all samples", "batch size", gets):
        table.add_column(heading, justify="right")
    found = training(
        images, labels, batch_size=chosen.batch_size, steps=chosen.steps, seed=chosen.seed
    )
    for stage in found:
        pick = power_of_two(stage.running)
        share = chosen.batch_size / (chosen.batch_size + stage.whole) if stage.whole > 0 else 0
        numbers = (f"{stage.loss:.3f}", f"{stage.running:.1f}", f"{stage.whole:.1f}")
        table.add_row(str(stage.step), *numbers, str(pick or "too noisy"), f"{share:.0%}")
    console = Console()
    console.print(table)
    console.print("Batch size: the power of two nearest to the running noise scale.")
    console.print("Last column: progress relative to a step on all samples, by the formula.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
