"""What other machines choose gives the loop, too: their ways are run here, without kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.factors import choosing as factor_choosing
from pergrad.factors import convolution, products
from pergrad.reductions import choosing, gram, inner, norms, sketches, sums
from pergrad.rules import cells, normalization, recurrence
from pergrad.runtime import MACHINES, Chooser, internals
from pergrad.runtime.caches import clear_caches
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import numbers

RULES = (products, convolution, cells, recurrence, normalization)
REDUCTIONS = (gram, inner, norms, sketches, sums)
OTHERS = {f"{m.device}, {m.mode}": m for m in MACHINES.values() if m.device != "cpu"}
B, D, T = 3, 4, 5


def fused_lstm_cell(x: Tensor, hidden: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what torch's kernel for a GPU does."""
    i, f, g, o = (x + hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


def fused_lstm_cell_backward(
    of_h: Tensor, of_c: Tensor, c: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, None]:
    assert not has_bias
    i, f, g, o = gates.chunk(4, 1)
    total = of_c + of_h * o * (1 - after.tanh() ** 2)
    each = [
        total * g * i * (1 - i),
        total * c * f * (1 - f),
        total * i * (1 - g**2),
        of_h * after.tanh() * o * (1 - o),
    ]
    return torch.cat(each, 1), total * f, None


@pytest.fixture(autouse=True, params=OTHERS)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Has rules and reductions choose as on another machine."""
    other = OTHERS[request.param]

    def of_reductions(*_: Tensor, by_kernels: bool = True) -> Chooser:
        return choosing.chooser_for(other, False)

    for module in RULES:
        monkeypatch.setattr(module, "chooser_of", lambda _: factor_choosing.CHOOSERS[other])
    for module in REDUCTIONS:
        monkeypatch.setattr(module, "chooser_of", of_reductions)
    for function in (fused_lstm_cell, fused_lstm_cell_backward):
        monkeypatch.setattr(internals, function.__name__, function)
    torch.manual_seed(0)
    yield request.param
    clear_caches()


class Recurrent(nn.Module):
    """The outputs and last states of a recurrent layer, one row of positions for each sample."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(D, 3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        output, last = self.layer(x)
        states = last if isinstance(last, tuple) else (last,)
        return torch.cat([output.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)


class Words(nn.Module):
    """A table of words before a linear layer, which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.abs() * 10).long() % 7)
        return self.layer(self.layer(rows).tanh())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, 2)), (D,)),
    "positions": (lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, 2)), (T, D)),
    "words": (Words, (T,)),
    "layer norm": (lambda: nn.LayerNorm(D), (T, D)),
    "layer norm of rows": (lambda: nn.LayerNorm(D), (D,)),
    "layer norm of matrices": (lambda: nn.LayerNorm((T, D)), (2, T, D)),
    "group norm": (lambda: nn.GroupNorm(2, D), (D, T)),
    "group norm of rows": (lambda: nn.GroupNorm(2, D), (D,)),
    "group norm of images": (lambda: nn.GroupNorm(2, D), (D, T, 2)),
    "convolution": (lambda: nn.Conv1d(D, 6, 3, padding=1), (D, T)),
    "convolution of images": (lambda: nn.Conv2d(D, 6, 3, padding=1, stride=2), (D, T, T)),
    "depthwise convolution": (lambda: nn.Conv2d(D, D, 3, groups=D), (D, T, T)),
    "LSTM": (lambda: Recurrent(nn.LSTM), (T, D)),
    "LSTM without bias": (lambda: Recurrent(nn.LSTM, bias=False, bidirectional=True), (T, D)),
    "LSTM with projections": (lambda: Recurrent(nn.LSTM, proj_size=2), (T, D)),
    "GRU": (lambda: Recurrent(nn.GRU), (T, D)),
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) + 0.5).pow(3).flatten(1).sum(1)


@pytest.mark.parametrize("name", MODELS)
def test_quantities_are_those_of_the_loop(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build().double(), numbers(B, *shape)
    expected = loop_grads(model, losses, x)
    grads, total, squares = pergrad.Grads(), pergrad.Sum(), pergrad.SecondMoment()
    length, gram_matrix = pergrad.Norms(), pergrad.Gram()
    clipped = pergrad.ClippedSum(1.0)
    for quantity in (grads, total, squares, length, gram_matrix, clipped):
        with pergrad.record(model, quantity):
            losses(model, x).sum().backward()
    wanted = torch.stack([g.flatten(1).norm(dim=1) for g in expected.values()]).norm(dim=0)
    assert_near(length.result, wanted)
    flat = torch.cat([g.flatten(1) for g in expected.values()], 1)
    assert_near(gram_matrix.result, flat @ flat.T)
    scale = (1 / wanted).clamp(max=1)
    for of, g in expected.items():
        assert_near(grads.result[of], g, of)
        assert_near(total.result[of], g.sum(0), of)
        assert_near(squares.result[of], g.square().sum(0), of)
        assert_near(clipped.result[of], torch.einsum("n,n...->...", scale, g), of)


@pytest.mark.parametrize("name", ["linear", "positions", "words", "convolution", "LSTM"])
def test_sketches_are_those_that_every_machine_draws(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, shape = MODELS[name]
    model, x = build().double(), numbers(B, *shape)

    def sketched() -> Tensor:
        with pergrad.record(model, pergrad.Projection(8)) as projection:
            losses(model, x).sum().backward()
        return projection.result

    found = sketched()
    monkeypatch.undo()
    clear_caches()
    assert_near(found, sketched())


def test_parameters_of_a_low_precision_lstm_are_those_of_float32(machine: str) -> None:
    model, x = Recurrent(nn.LSTM), torch.randn(B, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        found = pergrad.grads(model, losses, x)
    for name, g in loop_grads(model, losses, x).items():
        assert float((found[name] - g).norm() / g.norm()) < 0.1, (machine, name)
