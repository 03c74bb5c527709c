"""A loss that does not call the recorded module, but methods and parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.engine.recording.starting import batch_of_part, batch_of_step
from pergrad.testing import assert_near, loop_grads


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.out = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.randn(3, 3))

    def encode(self, x: Tensor) -> Tensor:
        return self.net(x * 2 - 1)

    def by_token(self, x: Tensor) -> Tensor:  # moves the samples before it uses a weight
        return self.net(x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1)).unflatten(0, (-1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def squares(h: Tensor) -> Tensor:
    return h.flatten(1).square().sum(1)


LOSSES: dict[str, Callable[[Coder, Tensor], Tensor]] = {
    "method": lambda m, x: squares(m.encode(x)),
    "part": lambda m, x: squares(m.net(x)),
    "part of a part": lambda m, x: squares(m.net[2](m.net[0](x))),
    "two parts": lambda m, x: squares(m.net(x) * m.out(x)),
    "part, then the whole": lambda m, x: squares(m(m.encode(x))),
    "weight by itself": lambda m, x: squares(F.linear(x, m.w)),
    "moved before": lambda m, x: squares(m.by_token(x)),
    "row by row": lambda m, x: torch.stack([m.net(row).square().sum() for row in x]),
    "without gradients before": lambda m, x: squares(m.net(x) - m.out(x).detach()),
}


@pytest.mark.parametrize("cut", [lambda x: x[1:3], lambda x: x.split(2)[0]])
def test_part_called_with_rows_that_the_block_cuts_is_exact(
    model: Coder, cut: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(4, 3).double()
    with pergrad.record(model, pergrad.Grads()) as found:
        squares(model.net(cut(x)) * model.w[0]).sum().backward()
    expected = loop_grads(model, lambda m, x: squares(m.net(x) * m.w[0]), cut(x))
    for name, g in expected.items():
        assert_near(found.result[name], g)


@pytest.fixture
def model() -> Coder:
    torch.manual_seed(0)
    return Coder().double()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_loss_that_calls_parts_of_the_module_is_exact(model: Coder, name: str, size: int) -> None:
    x = torch.randn(size, 3).double()
    expected = loop_grads(model, LOSSES[name], x)
    found = pergrad.grads(model, LOSSES[name], x)
    for key, rows in expected.items():
        assert_near(found[key], rows, key)
    squared = sum((g.square().flatten(1).sum(1) for g in expected.values()), torch.zeros(size))
    torch.testing.assert_close(pergrad.norms(model, LOSSES[name], x), squared.sqrt())
    assert not [t for t in (x, *model.parameters()) if hasattr(t, "_pergrad_layout")]


@pytest.mark.parametrize("name", ["method", "part", "two parts", "moved before"])
def test_first_part_that_is_called_tells_the_batch_of_a_block(model: Coder, name: str) -> None:
    x = torch.randn(5, 3).double()
    grads = pergrad.Grads()
    if name == "moved before":  # the part gets two rows of each sample: it cannot know
        with pergrad.record(model, grads, batch_size=5):
            LOSSES[name](model, x).sum().backward()
    else:
        with pergrad.record(model, grads):
            LOSSES[name](model, x).sum().backward()
    for key, rows in loop_grads(model, LOSSES[name], x).items():
        assert_near(grads.result[key], rows, key)


def test_uses_without_gradients_do_not_begin_a_recording(model: Coder) -> None:
    x = torch.randn(5, 3).double()
    grads = pergrad.Grads()
    with pergrad.record(model, grads):
        with torch.no_grad():
            assert model.net(torch.randn(7, 3).double()).shape == (7, 3)
        squares(model(x)).sum().backward()
    for key, rows in loop_grads(model, lambda m, x: squares(m(x)), x).items():
        assert_near(grads.result[key], rows, key)


def test_size_of_a_weight_alone_does_not_stop_a_recording(model: Coder) -> None:
    x = torch.randn(5, 3).double()
    grads = pergrad.Grads()
    with pergrad.record(model, grads):
        assert model.w.norm() > 0  # nothing tells the batch
        squares(model(x)).sum().backward()
    assert grads.result["out.weight"].shape == (5, 3, 3)


def test_losses_that_depend_on_weights_alone_are_those_of_the_samples(model: Coder) -> None:
    x = torch.randn(3, 3).double()

    def penalties(m: Coder, x: Tensor) -> Tensor:
        return m.w.square().sum().expand(len(x)) * torch.arange(1.0, 4.0, dtype=torch.double)

    found = pergrad.grads(model, penalties, x)["w"]
    for n in range(3):
        assert_near(found[n], 2 * (n + 1) * model.w.detach())


@pytest.mark.parametrize("size", [4, 3])
def test_matrix_that_a_weight_makes_is_no_sample_s(size: int) -> None:
    """A matrix is put together from entries, as in flows, before anything tells where the samples are."""

    class Triangular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entries = nn.Parameter(torch.randn(6, dtype=torch.float64))

        def transformed(self, x: Tensor) -> Tensor:
            upper = self.entries.new_zeros(4, 4)
            upper[tuple(torch.triu_indices(4, 4, 1))] = self.entries
            return F.linear(x, upper)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.transformed(x).square().sum(1)

    model, x = Triangular(), torch.randn(size, 4, dtype=torch.float64)
    found, expected = pergrad.grads(model, loss, x), loop_grads(model, loss, x)
    assert_near(found["entries"], expected["entries"])


def test_tensors_before_the_recording_are_not_held(model: Coder) -> None:
    x = torch.randn(3, 3).double()
    with pergrad.record(model, pergrad.Norms()):
        for _ in range(100):
            x = x + 1
        squares(model(x)).sum().backward()


def test_arguments_that_disagree_do_not_tell_the_batch() -> None:
    agreed = batch_of_step((torch.ones(4, 2), {"y": torch.ones(4)}), 0)
    assert agreed is not None
    assert agreed[1] == 4
    assert batch_of_step((torch.ones(4, 2), torch.ones(5)), 0) is None
    assert batch_of_step(None, 0) is None
    assert batch_of_step((1, "two"), 0) is None


def test_outermost_part_of_the_module_tells_the_batch() -> None:
    seen: list[Any] = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(batch_of_part(parts, 0))
            return x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten())

    outer = Outer()
    parts = [*outer.modules()]
    outer(torch.ones(2, 3))
    assert seen[0][1] == 2
    parts = [outer.inner]
    outer(torch.ones(2, 3))
    assert seen[1][1] == 6
    assert batch_of_part(parts, 0) is None
