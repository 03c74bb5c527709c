"""Attributes of quantities survive being split into tensors and joined again, in any containers."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pergrad.engine.compiling.results import clear, fill, take_apart


class Pair(NamedTuple):
    a: Tensor
    b: str


class Holder:
    """A quantity as far as results go: attributes, and `settle`."""

    def __init__(self) -> None:
        self.option = 0.5
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1


WEIGHT = torch.ones(2)
HELD: dict[str, Any] = {
    "a tensor": lambda t: t,
    "a dict": lambda t: {"x": t, "name": "x"},
    "a nested dict": lambda t: {"x": {"y": [t, None]}},
    "a list and a tuple": lambda t: [(t, 1), "text"],
    "a named tuple": lambda t: Pair(t, "b"),
    "an ordered dict": lambda t: OrderedDict(x=t),
    "nothing": lambda t: None,
}


def taken(build: Any, t: Tensor) -> tuple[Any, list[Tensor], list[Holder]]:
    before = [Holder()]
    after = [copy.copy(q) for q in before]
    after[0].result = build(t)  # type: ignore[attr-defined]
    template, results = take_apart(before, after, [WEIGHT])  # type: ignore[arg-type]
    return template, results, before


@pytest.mark.parametrize("name", HELD)
def test_other_tensors_take_the_place_of_those_of_the_trace(name: str) -> None:
    build, traced, real = HELD[name], torch.zeros(2), torch.ones(2)
    template, results, quantities = taken(build, traced)
    assert [id(t) for t in results] == ([] if name == "nothing" else [id(traced)])
    fill(quantities, template, [real] * len(results), [WEIGHT])  # type: ignore[arg-type]
    found, wanted = quantities[0].result, build(real)  # type: ignore[attr-defined]
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)
    assert quantities[0].settled == 1


def test_tensors_of_the_model_are_no_results_but_those_of_the_state() -> None:
    template, results, quantities = taken(lambda t: {"weight": t}, WEIGHT)
    assert results == []
    other = torch.zeros(2)
    fill(quantities, template, [], [other])  # type: ignore[arg-type]
    assert quantities[0].result["weight"] is other  # type: ignore[attr-defined]


def test_attributes_that_the_step_left_alone_are_no_part_of_the_template() -> None:
    template, _, quantities = taken(lambda t: t, torch.zeros(2))
    assert [list(attributes) for attributes in template.attributes] == [["result"]]
    quantities[0].option = 0.25
    fill(quantities, template, [torch.ones(2)], [])  # type: ignore[arg-type]
    assert quantities[0].option == 0.25


def test_last_results_are_let_go_of() -> None:
    template, results, quantities = taken(lambda t: t, torch.zeros(2))
    fill(quantities, template, results, [])  # type: ignore[arg-type]
    clear(quantities, template)  # type: ignore[arg-type]
    assert quantities[0].result is None  # type: ignore[attr-defined]
    assert quantities[0].option == 0.5
