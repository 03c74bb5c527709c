"""Every quantity on whole models, against the loop over samples in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, numbers
from tests.quantities.oracle import check_all, losses
from tests.zoo.architecture import Architecture
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.precision import InDouble, default_dtype


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


ZOO = ["GPT-2", "Llama", "ALBERT", "Mixtral", "T5", "ViT", "ConvNeXt"]


@pytest.mark.parametrize("name", ZOO)
def test_quantities_of_transformers_models(name: str) -> None:
    architecture: Architecture = ARCHITECTURES[name]
    with default_dtype(torch.float64):
        model = architecture.build("sdpa", "eager", torch.float64)
        check_all(model, losses_of_logits, architecture.inputs(3))


def losses_of_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with InDouble():
        return losses(lambda: model(**inputs)[0])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.norm(self.first(x)))))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        Block(4),
        nn.MaxPool2d(2),
        Block(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def lstm() -> nn.Module:
    return Formula(
        lambda m, x: m.head(m.rnn(x)[0]),
        rnn=nn.LSTM(4, 5, 2, batch_first=True),
        head=nn.Linear(5, 2),
    )


def attention() -> nn.Module:
    return Formula(
        lambda m, x: m.mha(x, x, x)[0], mha=nn.MultiheadAttention(4, 2, batch_first=True)
    )


def derived() -> nn.Module:
    """Weight norm, spectral factors of a transposed convolution, and a tied transpose."""
    return Formula(
        lambda m, x: F.linear(m.up(m.normed(x).tanh()), m.v * m.v.norm()),
        normed=parametrizations.weight_norm(nn.Linear(6, 5)),
        up=parametrizations.weight_norm(nn.ConvTranspose1d(4, 3, 3, stride=2, output_padding=1)),
        v=numbers(2, 12),
    )


def raw() -> nn.Module:
    """A scalar, a parameter met in two ways, a broadcast embedding of positions, one never met."""
    return Formula(
        lambda m, x: (x @ m.w).tanh() @ m.w.T * m.scale + m.positions[: x.shape[1]] * m.scale,
        scale=numbers(),
        w=numbers(6, 3),
        positions=numbers(9, 6),
        unused=numbers(2, 2),
    )


def embedding() -> nn.Module:
    """Tied to the head, with one token more often than once."""
    return Formula(
        lambda m, i: F.linear(m.mix(F.embedding(i, m.table)), m.table),
        table=numbers(11, 4),
        mix=nn.Linear(4, 4),
    )


OWN: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "ResNet": (resnet, lambda n: numbers(n, 3, 8, 8)),
    "LSTM": (lstm, lambda n: numbers(n, 6, 4)),
    "attention": (attention, lambda n: numbers(n, 5, 4)),
    "derived weights": (derived, lambda n: numbers(n, 4, 6)),
    "raw expressions": (raw, lambda n: numbers(n, 5, 6)),
    "tied": (embedding, lambda n: torch.randint(11, (n, 7))),
}


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("name", OWN)
def test_quantities_of_models_of_all_sorts(name: str, size: int) -> None:
    build, inputs = OWN[name]
    model, x = build().double(), inputs(size)
    expected = loop_grads(model, losses, x)
    options: dict[str, Any] = {"batch_size": size} if size == 1 else {}
    check_all(model, losses, x, expected=expected, **options)
    check_all(model, losses, x, expected=expected, max_bytes=1, **options)
    check_all(
        model, losses, x, expected=expected, reduce=torch.mean, loss_reduction="mean", **options
    )
