"""Builds the data sets of the benchmark: bundled with scikit-learn or generated, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

__all__ = ["CHOSEN_ON", "DATA", "FEW_COLUMNS", "NEW", "USED", "Data"]

_HIDDEN = 64


@dataclass(frozen=True)
class Data:
    """Inputs with their right labels, and the model to train on them."""

    x: Tensor  # (n, ...)
    y: np.ndarray  # (n,) int64
    network: Callable[[], nn.Module]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


def _mlp(features: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(features, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, classes)
    )


def _deep(features: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(nn.Linear(features, _HIDDEN), nn.LayerNorm(_HIDDEN), nn.GELU()),
        *(nn.Linear(_HIDDEN, _HIDDEN), nn.LayerNorm(_HIDDEN), nn.GELU()),
        nn.Linear(_HIDDEN, classes),
    )


def _convnet(classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, classes)),
    )


def _tabular(
    x: np.ndarray, y: np.ndarray, network: Callable[[int, int], Callable[[], nn.Module]] = _mlp
) -> Data:
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    classes = int(y.max()) + 1
    return Data(torch.from_numpy(x).float(), y.astype(np.int64), network(x.shape[1], classes))


def digits(seed: int) -> Data:
    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.data).float() / 16
    return Data(x, bunch.target.astype(np.int64), _mlp(64, 10))


def digits_convnet(seed: int) -> Data:
    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    return Data(x, bunch.target.astype(np.int64), lambda: _convnet(10))


def breast_cancer(seed: int) -> Data:
    return _tabular(*datasets.load_breast_cancer(return_X_y=True))


def wine(seed: int) -> Data:
    return _tabular(*datasets.load_wine(return_X_y=True))


def clusters(seed: int) -> Data:
    made = datasets.make_classification(
        1200, 20, n_informative=10, n_classes=5, class_sep=1.5, flip_y=0.0, random_state=seed
    )
    return _tabular(*made)


def blobs(seed: int) -> Data:
    x, y = datasets.make_blobs(1000, 12, centers=6, cluster_std=3.0, random_state=seed)[:2]
    return _tabular(x, y, _deep)


def moons(seed: int) -> Data:
    """Two moons, and eight dimensions of noise."""
    x, y = datasets.make_moons(1000, noise=0.12, random_state=seed)
    noise = np.random.default_rng(seed).normal(size=(1000, 8))
    return _tabular(np.c_[x, 0.3 * noise], y)


def shells(seed: int) -> Data:
    """Four concentric shells in six dimensions."""
    x, y = datasets.make_gaussian_quantiles(
        n_samples=1200, n_features=6, n_classes=4, random_state=seed
    )
    return _tabular(x, y, _deep)


def eights(seed: int) -> Data:
    """The digits by pairs: five classes of two digits each, under an attention of rows."""
    bunch = datasets.load_digits()
    x = torch.from_numpy(bunch.images).float() / 16
    return Data(x, (bunch.target % 5).astype(np.int64), _Attention)


def plane(seed: int) -> Data:
    x, y = datasets.make_blobs(800, 2, centers=4, cluster_std=1.5, random_state=seed)[:2]
    return _tabular(x, y)


def space(seed: int) -> Data:
    x, y = datasets.make_blobs(800, 3, centers=4, cluster_std=1.5, random_state=seed)[:2]
    return _tabular(x, y, _deep)


def four_columns(seed: int) -> Data:
    made = datasets.make_classification(
        800,
        4,
        n_informative=4,
        n_redundant=0,
        n_classes=3,
        n_clusters_per_class=1,
        random_state=seed,
    )
    return _tabular(*made)


def bare_moons(seed: int) -> Data:
    return _tabular(*datasets.make_moons(1000, noise=0.12, random_state=seed))


def three_shells(seed: int) -> Data:
    made = datasets.make_gaussian_quantiles(
        n_samples=1200, n_features=3, n_classes=3, random_state=seed
    )
    return _tabular(made[0], made[1], _deep)


class _Attention(nn.Module):
    """A transformer of one layer over the eight rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 32)
        self.position = nn.Parameter(0.1 * torch.randn(8, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inner(x) + self.position).mean(1))


# Near-duplicates of few columns: chance alone brings samples near each other there.
_FEW_CHOSEN_ON = (plane, space, four_columns)
FEW_COLUMNS: dict[str, Callable[[int], Data]] = {
    made.__name__: made for made in (*_FEW_CHOSEN_ON, bare_moons, three_shells)
}
CHOSEN_ON: dict[str, Callable[[int], Data]] = {
    made.__name__: made for made in (digits, digits_convnet, breast_cancer, wine, clusters)
}
NEW: dict[str, Callable[[int], Data]] = {
    made.__name__: made for made in (blobs, moons, shells, eights)
}
DATA = CHOSEN_ON | NEW
USED: frozenset[str] = frozenset([*CHOSEN_ON, *(made.__name__ for made in _FEW_CHOSEN_ON)])
