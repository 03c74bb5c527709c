"""A block fills a quantity once: a second one raises, or adds to it if it accumulates."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import MixedSamplesError, ScopeError
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients
from pergrad.testing import loop_grads
from tests.quantities.oracle import NAMES, assert_is_quantity_of, direction_of, losses, quantity

ONCE = [name for name in NAMES if name != "noise"]
JOINABLE = [name for name in NAMES if name != "gram"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, dtype=torch.float64)


def recorded(found: Any, model: nn.Module, x: Tensor) -> Any:
    with pergrad.record(model, found):
        losses(model, x).sum().backward()
    return found


def accumulating(name: str, model: nn.Module) -> Any:
    found = quantity(name, dict(model.named_parameters()))
    found.accumulate = True
    return found


@pytest.mark.parametrize("name", ONCE)
def test_second_block_is_refused_until_the_quantity_is_reset(name: str) -> None:
    model, x = net(), rows(4)
    found = recorded(quantity(name, dict(model.named_parameters())), model, rows(3))
    with (
        pytest.raises(ScopeError, match=r"reset\(\) first.*accumulate=True"),
        pergrad.record(model, found),
    ):
        raise AssertionError("the block must not run")
    found.reset()
    assert "no result yet" in repr(found)
    assert_is_quantity_of(recorded(found, model, x), loop_grads(model, losses, x), name)


@pytest.mark.parametrize("name", JOINABLE)
def test_blocks_collect_in_a_quantity_that_accumulates(name: str) -> None:
    model, x = net(), rows(6)
    found = accumulating(name, model)
    for part in x.split([2, 1, 3]):
        recorded(found, model, part)
    assert found.samples == 6
    assert_is_quantity_of(found, loop_grads(model, losses, x), name)


@pytest.mark.parametrize("name", JOINABLE)
def test_an_error_in_a_later_block_leaves_what_was_collected(name: str) -> None:
    model, x = net(), rows(5)
    found = accumulating(name, model)
    recorded(found, model, x[:2])
    with pytest.raises(MixedSamplesError), pergrad.record(model, found):
        losses(model, x).softmax(0).max().backward()
    recorded(found, model, x[2:])
    assert_is_quantity_of(found, loop_grads(model, losses, x), name)
    assert all(p.grad is None for p in model.parameters())


def test_compiled_step_replaces_results_and_adds_to_those_that_accumulate() -> None:
    model = net()
    last, all_of_them = pergrad.Norms(), pergrad.Norms(accumulate=True)
    step = pergrad.compiled(model, losses, last, all_of_them, backend="eager")
    parts = [rows(3) for _ in range(4)]
    for part in parts:
        step(part)
    assert step.graphs == 1
    expected = [pergrad.norms(model, losses, part) for part in parts]
    torch.testing.assert_close(last.result, expected[-1])
    torch.testing.assert_close(all_of_them.result, torch.cat(expected))


def test_noise_scale_spans_blocks() -> None:
    model = net()
    noise, every = pergrad.NoiseScale(decay=0.5), pergrad.NoiseScale(decay=0.5, accumulate=True)
    parts = rows(6).split(3)
    for part in parts:
        with pergrad.record(model, noise, every):
            losses(model, part).sum().backward()
    assert_is_quantity_of(noise, loop_grads(model, losses, parts[1]), "noise")
    assert_is_quantity_of(every, loop_grads(model, losses, torch.cat(parts)), "noise")
    assert noise.running == every.running != noise.result


def test_gram_of_all_pairs_cannot_accumulate() -> None:
    with pytest.raises(pergrad.PergradError, match="inner products across"):
        pergrad.Gram(accumulate=True)
    direction = direction_of(dict(net().named_parameters()), 2)
    assert pergrad.Gram(direction, accumulate=True).accumulate


def test_quantities_of_ones_own_are_filled_once_too() -> None:
    class Count(Quantity):
        def begin(self, batch: Batch) -> None:
            self.seen = 0

        def consume(self, name: str, gradients: SampleGradients) -> None:
            self.seen += 1

        def end(self) -> None:
            pass

        def merge(self, other: Any) -> None:
            self.seen += other.seen

    model, x = net(), rows(2)
    found = recorded(Count(), model, x)
    with pytest.raises(ScopeError, match="this Count has"):
        recorded(found, model, x)
    found.accumulate = True
    assert recorded(found, model, x).seen == 8
