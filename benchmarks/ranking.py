"""Measures how well suspicion finds flipped labels, against loss alone, at several stages of training.

Run as ``python -m benchmarks.ranking``; ``--epochs`` and ``--seeds`` select a part. The demo's convnet is
trained on scikit-learn's digits with some labels flipped: at random, or each to the next class, which is
harder because wrong samples then resemble each other. The seeds differ from those that grade the demo,
because the formula was chosen with these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import pergrad
from pergrad.attribution import Grade, Samples, analyse, grade

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mislabelled_digits as demo

_SKETCH = 256


def digits_named_next(share: float, seed: int) -> demo.Digits:
    """Returns the digits with round(share * n) random labels changed to the next class."""
    digits = demo.digits_with_flips(0.0, seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(digits), generator=generator)[: round(share * len(digits))]
    given = digits.true.clone()
    given[chosen] = (given[chosen] + 1) % demo.CLASSES
    return demo.Digits(digits.images, given, digits.true)


FLIPS = {"random": demo.digits_with_flips, "next": digits_named_next}


def graded(digits: demo.Digits, *, epochs: int, seed: int) -> Grade:
    """Grades a convnet trained on the given labels for `epochs` epochs."""
    model = demo.convnet(seed)
    for _ in demo.training(model, digits, epochs=epochs, seed=seed):
        pass
    with pergrad.record(model, pergrad.Norms(), pergrad.Projection(_SKETCH)) as (norms, sketch):
        losses = demo.losses(model, digits.images, digits.given)
        losses.sum().backward()
    samples = Samples(
        np.arange(len(digits)),
        losses.detach().double().numpy(),
        norms.result.double().numpy(),
        {},
        sketch.result.numpy(),
    )
    known = np.flatnonzero(digits.flipped.numpy())
    return grade(samples.index, analyse(samples).suspicion, samples.loss, known)


def row_of(epochs: int, grades: Sequence[Grade]) -> list[str]:
    """Returns means over the seeds, and the number of seeds where suspicion is no worse than loss."""
    ours = np.array([found.average_precision for found in grades])
    by_loss = np.array([found.average_precision_by_loss for found in grades])
    least = min(found.within[1].found / found.known for found in grades)
    no_worse = f"{int((ours >= by_loss).sum())} of {len(grades)}"
    return [str(epochs), f"{ours.mean():.4f}", f"{by_loss.mean():.4f}", no_worse, f"{least:.1%}"]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5, 12, 30])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(100, 112)))
    parser.add_argument("--share", type=float, default=0.05, help="share of labels to flip")
    parser.add_argument(
        "--flips", choices=FLIPS, default="random", help="how flipped labels are chosen"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    table = Table(title=f"Flipped labels ({chosen.flips}, {chosen.share:.0%}): average precision")
    for heading in ("epochs", "suspicion", "loss alone", "no worse", "least found in the top 10%"):
        table.add_column(heading, justify="right")
    for epochs in chosen.epochs:
        grades = [
            graded(FLIPS[chosen.flips](chosen.share, seed), epochs=epochs, seed=seed)
            for seed in chosen.seeds
        ]
        table.add_row(*row_of(epochs, grades))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
