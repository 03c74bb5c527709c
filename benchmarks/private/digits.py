"""Trains on scikit-learn's digits with pergrad, with Opacus by the same plan, and with pergrad's best recipe.

`python -m benchmarks.private.digits --workers 16` writes benchmarks/results/private/digits.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.private.results import in_processes, write
from pergrad.private import Plan, Step

__all__ = ["Recipe", "accuracy", "main"]

DELTA = 1e-5
TRAIN = 1437  # of 1797; the rest is for testing
EPSILONS = (1.0, 3.0, 8.0)


@dataclass(frozen=True)
class Recipe:
    """How to train; `library` is "pergrad" or "opacus"."""

    library: str = "pergrad"
    batch_size: int = 144
    epochs: float = 20.0
    lr: float = 1.0
    momentum: float = 0.0
    max_norm: float = 1.0
    width: int = 16
    views: int = 1
    shift: float = 0.0  # of views, in pixels
    turn: float = 0.0  # of views, in degrees
    decay: float = 0.0  # of averaged parameters
    clipping: str = "flat"
    kind: str = "conv"

    def plan(self, epsilon: float) -> Plan:
        rate = self.batch_size / TRAIN
        return Plan.calibrate(
            epsilon=epsilon,
            delta=DELTA,
            sample_rate=rate,
            steps=math.ceil(self.epochs / rate),
            max_norm=self.max_norm,
            expected_batch_size=self.batch_size,
            clipping=self.clipping,
        )


PLAIN = Recipe()
# Tuned on seeds 100 to 105: fixed features, large batches, averaged parameters. Views did not help.
_FEATURES = Recipe(kind="slopes", width=8, batch_size=720, epochs=20.0, decay=0.95)
BEST = {
    1.0: replace(_FEATURES, lr=64.0, max_norm=0.25),
    3.0: replace(_FEATURES, lr=128.0, max_norm=0.25, width=16, epochs=40.0),
}


class Slopes(nn.Module):
    """Fixed features that know nothing of the data: pixels, and slopes by direction in 2x2 cells."""

    def __init__(self, directions: int) -> None:
        super().__init__()
        angle = torch.arange(directions) * (2 * math.pi / directions)
        self.register_buffer("directions", torch.stack([angle.cos(), angle.sin()], 1))
        self.size = 64 + 16 * directions

    def forward(self, x: Tensor) -> Tensor:  # (n, 1, 8, 8) -> (n, size)
        across = F.pad(x, (1, 1, 0, 0), mode="replicate").diff(n=1, dim=3)
        down = F.pad(x, (0, 0, 1, 1), mode="replicate").diff(n=1, dim=2)
        slope = torch.stack(
            [across[..., 1:] + across[..., :-1], down[:, :, 1:] + down[:, :, :-1]], 2
        )
        along = torch.einsum("ncdhw,kd->nkhw", slope, self.directions)
        cells = F.avg_pool2d(along.relu(), 2).flatten(1)
        pixels = x.flatten(1)
        parts = [F.normalize(pixels - pixels.mean(1, keepdim=True)), F.normalize(cells)]
        return torch.cat(parts, 1)


class Net(nn.Sequential):
    """Two convolutions and a linear layer, of smooth functions; or a linear layer on fixed features."""

    def __init__(self, width: int, kind: str) -> None:
        if kind == "linear":
            super().__init__(nn.Flatten(), nn.Linear(64, 10))
        elif kind == "slopes":
            features = Slopes(width)
            head = nn.Linear(features.size, 10)
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
            super().__init__(features, head)
        else:
            super().__init__(
                nn.Conv2d(1, width, 3, padding=1),
                nn.GroupNorm(4, width),
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.GroupNorm(4, 2 * width),
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(8 * width, 10),
            )


def data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns images for training and for testing, (n, 1, 8, 8) in [-1, 1]."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.data).float().view(-1, 1, 8, 8) / 8 - 1
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    parts = order[:TRAIN], order[TRAIN:]
    found = [TensorDataset(images[rows], labels[rows]) for rows in parts]
    return found[0], found[1]


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Turned and shifted copies of each image, the first of them unchanged: (k, 1, 8, 8)."""

    def __init__(self, dataset: TensorDataset, recipe: Recipe) -> None:
        self.images, self.labels = dataset.tensors
        self.recipe = recipe

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        rows = torch.tensor(indices)
        k = self.recipe.views
        images = self.images[rows].repeat_interleave(k, 0)
        angle = torch.deg2rad((2 * torch.rand(len(images)) - 1) * self.recipe.turn)
        moved = (2 * torch.rand(len(images), 2) - 1) * self.recipe.shift / 4
        angle[::k], moved[::k] = 0, 0
        cos, sin = angle.cos(), angle.sin()
        matrix = torch.stack(
            [torch.stack([cos, -sin, moved[:, 0]], 1), torch.stack([sin, cos, moved[:, 1]], 1)], 1
        )
        grid = F.affine_grid(matrix, [len(images), 1, 8, 8], align_corners=False)
        turned = F.grid_sample(images + 1, grid, align_corners=False) - 1
        labels = self.labels[rows]
        return [*zip(turned.view(len(rows), k, 1, 8, 8), labels, strict=True)]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def losses_of_views(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:  # x: (n, k, 1, 8, 8)
    k = x.shape[1]
    return losses(model, x.flatten(0, 1), y.repeat_interleave(k)).view(-1, k)


def accuracy(recipe: Recipe, epsilon: float, seed: int) -> float:
    """Trains privately; returns the share of right answers on the test data."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    train, test = data(seed)
    model = Net(recipe.width, recipe.kind)
    plan = recipe.plan(epsilon)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()}
    number = 0

    def average() -> None:
        nonlocal number
        number += 1
        decay = min(recipe.decay, number / (number + 10))
        for name, p in model.named_parameters():
            averaged[name].lerp_(p.detach(), 1 - decay)

    if recipe.library == "opacus":
        _train_opacus(model, optimizer, train, plan, average)
    else:
        has_views = recipe.views > 1
        samples: Dataset[tuple[Tensor, ...]] = Views(train, recipe) if has_views else train
        loss_fn = losses_of_views if has_views else losses
        loader = plan.loader(samples, torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed + 10_000)
        step = Step(model, optimizer, loss_fn, plan, generator=generator, views=has_views)
        for batch in loader:
            step(*batch)
            average()
    model.load_state_dict(averaged, strict=False)
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def _train_opacus(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: TensorDataset,
    plan: Plan,
    average: Callable[[], None],
) -> None:
    from opacus.data_loader import DPDataLoader  # noqa: PLC0415  # an optional peer
    from opacus.grad_sample import GradSampleModule  # noqa: PLC0415
    from opacus.optimizers import DPOptimizer  # noqa: PLC0415

    wrapped = GradSampleModule(model)
    private = DPOptimizer(
        optimizer,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=float(plan.sensitivity),
        expected_batch_size=int(plan.expected_batch_size or 0),
    )
    loader = DPDataLoader.from_data_loader(
        DataLoader(train, batch_size=int(plan.expected_batch_size or 0))
    )
    loader.batch_sampler.sample_rate = plan.sample_rate
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in itertools.islice(batches, plan.steps):
            private.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            private.step()
            average()
    wrapped.remove_hooks()
    for p in model.parameters():
        for name in ("grad_sample", "summed_grad"):
            if hasattr(p, name):
                delattr(p, name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=200, help="no recipe was tuned on these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[*EPSILONS])
    parser.add_argument("--methods", nargs="+", default=["pergrad", "opacus", "best recipe"])
    parser.add_argument(
        "--output", default="digits.json", help="file in benchmarks/results/private"
    )
    chosen = parser.parse_args(arguments)
    jobs = []
    for epsilon in chosen.epsilons:
        recipes = {"pergrad": PLAIN, "opacus": replace(PLAIN, library="opacus")}
        if epsilon in BEST:
            recipes["best recipe"] = BEST[epsilon]
        jobs += [
            (name, recipe, epsilon, seed)
            for name, recipe in recipes.items()
            if name in chosen.methods
            for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        ]
    found = in_processes(_job, jobs, chosen.workers)
    rows = []
    for (epsilon, name), group in itertools.groupby(
        zip(jobs, found, strict=True), key=lambda pair: (pair[0][2], pair[0][0])
    ):
        members = [*group]
        values = [value for _, value in members]
        recipe = members[0][0][1]
        rows.append(
            {
                "epsilon": epsilon,
                "method": name,
                "mean": statistics.mean(values),
                "deviation": statistics.stdev(values) if len(values) > 1 else 0.0,
                "accuracies": values,
                "recipe": asdict(recipe),
                "noise_multiplier": recipe.plan(epsilon).noise_multiplier,
            }
        )
        row = rows[-1]
        print(f"epsilon {epsilon:g} {name:12} {row['mean']:.4f} ± {row['deviation']:.4f}")
    write(
        chosen.output,
        torch.device("cpu"),
        {"delta": DELTA, "first_seed": chosen.first_seed, "rows": rows},
    )
    return 0


def _job(job: tuple[str, Recipe, float, int]) -> float:
    _, recipe, epsilon, seed = job
    return accuracy(recipe, epsilon, seed)


if __name__ == "__main__":
    sys.exit(main())
