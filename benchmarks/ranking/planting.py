"""Plants errors in a data set: wrong labels of several kinds, outliers, near-duplicates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

__all__ = ["CHOSEN_WITH", "NEW_NOISES", "NOISES", "with_duplicates", "with_outliers"]

Noise = Callable[[np.ndarray, np.ndarray, int, np.random.Generator], np.ndarray]


def _others(y: np.ndarray, classes: int, generator: np.random.Generator) -> np.ndarray:
    return (y + generator.integers(1, classes, len(y))) % classes


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def uniform(
    x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator
) -> np.ndarray:
    """10% of the labels become another class."""
    chosen = generator.permutation(len(y))[: round(0.1 * len(y))]
    given = y.copy()
    given[chosen] = _others(y[chosen], classes, generator)
    return given


def next_class(
    x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator
) -> np.ndarray:
    """10% of the labels become the next class."""
    chosen = generator.permutation(len(y))[: round(0.1 * len(y))]
    given = y.copy()
    given[chosen] = (y[chosen] + 1) % classes
    return given


def confused(
    x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator
) -> np.ndarray:
    """30% of one class are given as one other class."""
    one, other = generator.permutation(classes)[:2]
    members = generator.permutation(np.flatnonzero(y == one))
    given = y.copy()
    given[members[: round(0.3 * len(members))]] = other
    return given


def borderline(
    x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator
) -> np.ndarray:
    """8% of the labels become the class of the nearest sample of another class, near samples more often."""
    flat = _flat(x)
    distance = ((flat[:, None] - flat[None]) ** 2).sum(-1)
    distance[y[:, None] == y[None]] = np.inf
    nearest = distance.argmin(1)
    weight = np.exp(-2 * distance.min(1) / np.median(distance.min(1)))
    chosen = generator.choice(len(y), round(0.08 * len(y)), replace=False, p=weight / weight.sum())
    given = y.copy()
    given[chosen] = y[nearest[chosen]]
    return given


def few(x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator) -> np.ndarray:
    """4% of the labels become another class."""
    chosen = generator.permutation(len(y))[: max(4, round(0.04 * len(y)))]
    given = y.copy()
    given[chosen] = _others(y[chosen], classes, generator)
    return given


def regional(
    x: np.ndarray, y: np.ndarray, classes: int, generator: np.random.Generator
) -> np.ndarray:
    """Half of the labels in a neighbourhood of a fifth of the samples become random ones."""
    flat = _flat(x)
    centre = flat[generator.integers(len(y))]
    near = ((flat - centre) ** 2).sum(1).argsort()[: len(y) // 5]
    chosen = generator.permutation(near)[: len(near) // 2]
    given = y.copy()
    given[chosen] = _others(y[chosen], classes, generator)
    return given


CHOSEN_WITH: dict[str, Noise] = {
    noise.__name__: noise for noise in (uniform, next_class, confused, borderline)
}
NEW_NOISES: dict[str, Noise] = {noise.__name__: noise for noise in (few, regional)}
NOISES = CHOSEN_WITH | NEW_NOISES


def with_outliers(x: Tensor, generator: np.random.Generator) -> tuple[Tensor, np.ndarray]:
    """Replaces 3% of the inputs: shuffled entries, noise of the data's spread, or other scales."""
    changed = x.clone()
    chosen = generator.permutation(len(x))[: max(6, round(0.03 * len(x)))]
    spread, centre = x.std(0), x.mean(0)
    for number, row in enumerate(chosen.tolist()):
        drawn = torch.from_numpy(generator.normal(size=tuple(x.shape[1:]))).float()
        if number % 3 == 0:
            order = torch.from_numpy(generator.permutation(x[0].numel()))
            changed[row] = x[row].flatten()[order].view_as(x[row])
        elif number % 3 == 1:
            changed[row] = centre + 2 * spread.clamp(min=0.1) * drawn
        else:
            changed[row] = centre - 3 * (x[row] - centre)
    return changed, chosen


def with_other_outliers(x: Tensor, generator: np.random.Generator) -> tuple[Tensor, np.ndarray]:
    """Replaces 3% of the inputs: a tenth of the entries far off, or uniform noise over the data's range."""
    changed = x.clone()
    chosen = generator.permutation(len(x))[: max(6, round(0.03 * len(x)))]
    low, high, spread = x.amin(0), x.amax(0), x.std()
    for number, row in enumerate(chosen.tolist()):
        if number % 2 == 0:
            entries = generator.permutation(x[0].numel())[: max(1, x[0].numel() // 10)]
            signs = torch.from_numpy(generator.choice([-4.0, 4.0], len(entries))).float()
            flat = x[row].flatten().clone()
            flat[torch.from_numpy(entries)] += signs * spread
            changed[row] = flat.view_as(x[row])
        else:
            drawn = torch.from_numpy(generator.random(tuple(x.shape[1:]))).float()
            changed[row] = low + (high - low) * drawn
    return changed, chosen


def with_duplicates(
    x: Tensor, y: np.ndarray, generator: np.random.Generator, *, scaled: bool = False
) -> tuple[Tensor, np.ndarray, set[tuple[int, int]]]:
    """Appends copies of 5% of the samples with a little noise, or scaled; returns the planted pairs too."""
    chosen = generator.permutation(len(x))[: max(5, round(0.05 * len(x)))]
    noise = torch.from_numpy(generator.normal(size=(len(chosen), *x.shape[1:]))).float()
    copies = x[torch.from_numpy(chosen)]
    if scaled:  # by up to 2%, one factor for each copy
        factor = 1 + 0.02 * (2 * torch.from_numpy(generator.random(len(chosen))).float() - 1)
        copies = copies * factor.view(-1, *[1] * (x.dim() - 1))
    else:
        copies = copies + 0.01 * x.std() * noise
    pairs = {(int(a), len(x) + n) for n, a in enumerate(chosen)}
    return torch.cat([x, copies]), np.concatenate([y, y[chosen]]), pairs
