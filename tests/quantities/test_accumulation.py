"""Quantities of micro-batches add up to that of the whole batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.errors import PergradError, ScopeError
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients
from pergrad.testing import loop_grads
from tests.engine.exactness import numbers
from tests.quantities.oracle import NAMES, assert_is_quantity_of, direction_of, losses, quantity

D = 4
JOINABLE = [name for name in NAMES if name != "gram"]
each = pytest.mark.parametrize("name", JOINABLE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def recorded(found: Any, model: nn.Module, x: Tensor, **options: Any) -> Any:
    with pergrad.record(model, found, **options):
        losses(model, x).sum().backward()
    return found


def built(name: str, model: nn.Module, cache: dict[str, Any] = {}) -> Any:  # noqa: B006
    """Directions count as the same if they are the same tensors."""
    parameters = dict(model.named_parameters())
    if name not in ("dots", "gram against"):
        return quantity(name, parameters)
    if name not in cache:
        cache[name] = direction_of(parameters, None if name == "dots" else 2)
    return pergrad.Dots(cache[name]) if name == "dots" else pergrad.Gram(against=cache[name])


def values_of(found: Any) -> list[Tensor]:
    """Copies of all that a quantity shows."""
    shown = []
    for attribute in ("result", "per_param", "norms", "mean", "trace"):
        try:
            value = getattr(found, attribute, None)
        except PergradError:  # the variance of one sample
            continue
        if isinstance(value, dict):
            shown += list(value.values())
        elif value is not None:
            shown.append(torch.as_tensor(value))
    return [t.clone() for t in shown]


@each
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    model, x = net(), numbers(6, 3, D)
    parts = x.split([2, 1, 3])
    total = built(name, model)
    for part in parts:
        total += recorded(built(name, model), model, part)
    assert_is_quantity_of(total, loop_grads(model, losses, x), name)


@each
def test_adding_to_one_that_was_recorded_itself(name: str) -> None:
    model, x = net(), numbers(5, 3, D)
    total = recorded(built(name, model), model, x[:2])
    total += recorded(built(name, model), model, x[2:])
    assert_is_quantity_of(total, loop_grads(model, losses, x), name)


@each
def test_adding_changes_nothing_but_the_left_hand_side(name: str) -> None:
    model, x = net(), numbers(6, 3, D)
    first, second, third = (recorded(built(name, model), model, part) for part in x.split(2))
    before = [values_of(q) for q in (first, second, third)]
    total = built(name, model)
    for part in (first, second, third):
        total += part
    for part, values in zip((first, second, third), before, strict=True):
        for now, then in zip(values_of(part), values, strict=True):
            assert torch.equal(now, then)
    first.reset()
    recorded(first, model, x[4:])  # nor does using one again change the sum
    assert_is_quantity_of(total, loop_grads(model, losses, x), name)


@each
def test_other_parameters_are_refused_and_leave_it_as_it_was(name: str) -> None:
    model, x = net(), numbers(4, 3, D)
    if name in ("dots", "gram against"):
        weights = {k: p for k, p in model.named_parameters() if k.startswith("2.")}
        given = direction_of(weights, None if name == "dots" else 2)
        first, second = (
            pergrad.Dots(given) if name == "dots" else pergrad.Gram(against=given) for _ in "ab"
        )
    else:
        first, second = built(name, model), built(name, model)
    recorded(first, model, x[:2])
    recorded(second, model, x[2:], params="2.*")
    before = values_of(first)
    with pytest.raises(PergradError, match=r"different parameters: \['0.bias', '0.weight'\]"):
        first += second
    for now, then in zip(values_of(first), before, strict=True):
        assert torch.equal(now, then)


@each
def test_one_without_a_result_cannot_be_added(name: str) -> None:
    model, x = net(), numbers(4, 3, D)
    for total in (built(name, model), recorded(built(name, model), model, x)):
        with pytest.raises(ScopeError, match="no result yet"):
            total += built(name, model)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "bounds": (pergrad.ClippedSum(1.0), pergrad.ClippedSum(2.0)),
    "weightings": (pergrad.ClippedSum(1.0), pergrad.ClippedSum(1.0, weighting="normalize")),
    "order of patterns": (
        pergrad.ClippedSum({"0.*": 1.0, "*": 2.0}),
        pergrad.ClippedSum({"*": 2.0, "0.*": 1.0}),
    ),
    "dimensions": (pergrad.Projection(8), pergrad.Projection(9)),
    "seeds": (pergrad.Projection(8), pergrad.Projection(8, seed=1)),
    "methods": (pergrad.Projection(8), pergrad.Projection(8, method="two_sided")),
    "kinds": (pergrad.Norms(), pergrad.SecondMoment()),
    "decays": (pergrad.NoiseScale(0.9), pergrad.NoiseScale(0.5)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_settings_are_refused(name: str) -> None:
    model, x = net(), numbers(4, 3, D)
    first, second = (recorded(q, model, x) for q in DIFFERENT[name])
    with pytest.raises(PergradError, match="same settings"):
        first += second


def test_memory_is_no_setting_that_matters() -> None:
    model, x = net(), numbers(4, 3, D)
    total = recorded(pergrad.ClippedSum(0.7), model, x[:1])
    total += recorded(pergrad.ClippedSum(0.7, memory="low"), model, x[1:])
    assert_is_quantity_of(total, loop_grads(model, losses, x), "clipped")


def test_pairs_across_batches_of_a_gram_are_refused_and_the_way_out_works() -> None:
    model, x = net(), numbers(5, 3, D)
    first = recorded(pergrad.Gram(), model, x[:2])
    with pytest.raises(PergradError, match=r"Gram\(against=grads.result\)"):
        first += recorded(pergrad.Gram(), model, x[2:])
    grads = recorded(pergrad.Grads(), model, x[:2])
    with pergrad.record(model, pergrad.Gram(against=grads.result), pergrad.Gram()) as (across, own):
        losses(model, x[2:]).sum().backward()
    whole = recorded(pergrad.Gram(), model, x)
    joined = torch.cat(
        [torch.cat([first.result, across.result.T], 1), torch.cat([across.result, own.result], 1)]
    )
    torch.testing.assert_close(joined, whole.result, rtol=1e-9, atol=1e-12)


def test_a_quantity_without_a_rule_for_it_says_so() -> None:
    class Count(Quantity):
        def begin(self, batch: Batch) -> None:
            self.result = 0

        def consume(self, name: str, gradients: SampleGradients) -> None:
            self.result += gradients.count

        def end(self) -> None:
            pass

    model, x = net(), numbers(4, 3, D)
    first, second = recorded(Count(), model, x), recorded(Count(), model, x)
    with pytest.raises(PergradError, match="Count cannot join two batches"):
        first += second
