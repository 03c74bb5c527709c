"""States and batches that a graph could tell apart have keys of their own, and only those."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from pergrad.engine.compiling.state import (
    StateNumbers,
    graph_inputs,
    signature_of_leaves,
    state_of,
)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout())


def test_state_has_parameters_and_buffers_once_and_the_modes() -> None:
    layers = model()
    layers[1].eval()
    state, training = state_of(layers)
    assert {id(t) for t in state} == {id(t) for t in (*layers.parameters(), *layers.buffers())}
    assert len(state) == 7
    assert training == tuple(m.training for m in layers.modules()) == (True, True, False, True)


def _freeze(layers: nn.Module) -> None:
    layers[0].bias.requires_grad_(False)


def _lie_otherwise(layers: nn.Module) -> None:
    layers[0].weight.data = torch.randn(3, 2).T


def _grow(layers: nn.Module) -> None:
    layers[0].weight.data = torch.randn(2, 4)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "frozen": _freeze,
    "strides": _lie_otherwise,
    "shape": _grow,
    "dtype": nn.Module.double,
    "device": lambda layers: layers.to("meta"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_states_that_differ_in_more_than_values_have_other_numbers(name: str) -> None:
    numbers, layers = StateNumbers(), model()
    first = numbers.number(state_of(layers)[0])
    CHANGES[name](layers)
    second = numbers.number(state_of(layers)[0])
    assert first != second
    assert numbers.number(state_of(model())[0]) == first  # known from before


def test_states_that_differ_in_their_values_have_one_number() -> None:
    numbers, layers = StateNumbers(), model()
    first = numbers.number(state_of(layers)[0])
    with torch.no_grad():
        layers[0].weight.add_(1)
    assert numbers.number(state_of(layers)[0]) == first


def test_autocast_is_that_of_the_states_devices() -> None:
    numbers = StateNumbers()
    numbers.number(state_of(model())[0])
    assert list(numbers.devices) == ["cpu"]
    before = numbers.autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert numbers.autocast() != before
    assert numbers.autocast() == before


@dataclass
class Options:
    factor: float
    names: tuple[str, ...] = ()


@dataclass
class Others(Options): ...


x = torch.ones(2, 3)
BATCHES: dict[str, list[Any]] = {
    "tensor": [x],
    "strides": [torch.ones(3, 2).T],
    "dtype": [x.double()],
    "grad": [x.clone().requires_grad_()],
    "meta": [x.to("meta")],
    "one": [x, 1],
    "true": [x, True],
    "float": [x, 1.0],
    "unhashable": [x, bytearray(b"1")],
    "another unhashable": [x, bytearray(b"2")],
    "dataclass": [x, Options(1.0)],
    "dataclass of other numbers": [x, Options(-0.0)],
    "dataclass of zero": [x, Options(0.0)],
    "dataclass of other names": [x, Options(1.0, ("a",))],
    "dataclass of another class": [x, Others(1.0)],
}


def test_batches_that_a_graph_could_tell_apart_have_signatures_of_their_own() -> None:
    found = {name: signature_of_leaves(flat) for name, flat in BATCHES.items()}
    assert len(set(found.values())) == len(BATCHES)
    assert signature_of_leaves([torch.zeros(2, 3)]) == found["tensor"]
    assert signature_of_leaves([x, Options(1.0)]) == found["dataclass"]


def test_a_graph_is_called_with_detached_tensors_only() -> None:
    weight = torch.ones(2, requires_grad=True)
    inputs = graph_inputs([weight], ["mean", x, 3])
    assert [t.shape for t in inputs] == [weight.shape, x.shape]
    assert not any(t.requires_grad for t in inputs)
    assert inputs[0].data_ptr() == weight.data_ptr()
