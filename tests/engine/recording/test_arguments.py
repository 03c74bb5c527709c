"""Leaves are found, and replaced, in whatever arguments are wrapped in."""

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree
from transformers import BatchEncoding

from pergrad.engine.recording.arguments import leaves, map_leaves
from tests.engine.ragged import graph_batch


@dataclass
class Open:
    x: Any
    note: str = "left"


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any


Named = namedtuple("Named", ["x"])
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "list and tuple": lambda x: [(1, x)],
    "dict": lambda x: {"x": x, "n": 2},
    "named tuple": Named,
    "user's dict": lambda x: UserDict(x=x),
    "read-only mapping": lambda x: MappingProxyType({"x": x}),
    "what a tokenizer gives": lambda x: BatchEncoding({"x": x}),
    "dataclass": Open,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slots,
    "all of them": lambda x: Open([UserDict(y=Frozen((Slots(Named(x)),)))]),
}
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


@each_wrapper
def test_every_tensor_is_a_leaf(name: str) -> None:
    x, y = torch.ones(2), torch.zeros(3)
    found = _tensors((WRAPPERS[name](x), WRAPPERS[name](y)))
    assert [id(t) for t in found] == [id(x), id(y)]


@each_wrapper
def test_leaves_are_replaced_and_the_argument_is_left_as_it_was(name: str) -> None:
    x, y = torch.ones(2), torch.zeros(3)
    given = WRAPPERS[name](x)
    changed = map_leaves(lambda leaf: y if leaf is x else leaf, given)
    assert type(changed) is type(WRAPPERS[name](y))
    assert [id(t) for t in _tensors(changed)] == [id(y)]
    assert [id(t) for t in _tensors(given)] == [id(x)]


@each_wrapper
def test_map_visits_what_the_iteration_finds_in_its_order(name: str) -> None:
    given, seen = [WRAPPERS[name](torch.ones(2)), WRAPPERS[name](3)], []
    map_leaves(seen.append, given)
    assert [id(leaf) for leaf in seen] == [id(leaf) for leaf in leaves(given)]


@pytest.mark.parametrize("name", ["user's dict", "frozen dataclass", "what a tokenizer gives"])
def test_what_has_no_leaf_to_replace_is_not_copied(name: str) -> None:
    given = WRAPPERS[name](torch.ones(2))
    assert map_leaves(lambda leaf: leaf, given) is given


def test_a_packed_sequence_is_one_leaf() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert list(leaves([packed])) == [packed]
    assert map_leaves(lambda leaf: isinstance(leaf, PackedSequence), {"x": packed}) == {"x": True}


def test_a_class_of_a_dataclass_is_a_leaf() -> None:
    assert list(leaves([Open])) == [Open]


def test_a_batch_of_graphs_is_copied_only_for_tensors_that_are_replaced() -> None:
    (graphs,) = graph_batch("GIN").batch
    graphs.names = ["a", "b"]
    assert map_leaves(lambda leaf: leaf, graphs) is graphs
    x, y = graphs.x, torch.zeros_like(graphs.x)
    changed = map_leaves(lambda leaf: y if leaf is x else leaf, graphs)
    assert changed.x is y
    assert graphs.x is x
    assert changed.edge_index is graphs.edge_index
    assert changed.names is graphs.names


class Pair:
    """A container that others have registered with torch."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


def test_containers_that_others_have_registered_are_opened() -> None:
    pytree.register_pytree_node(
        Pair, lambda pair: ([pair.first, pair.second], None), lambda parts, _: Pair(*parts)
    )
    try:
        x, y = torch.ones(2), torch.zeros(3)
        given = Pair(x, {"y": y})
        assert [id(t) for t in leaves([given])] == [id(x), id(y)]
        changed = map_leaves(lambda leaf: y if leaf is x else leaf, given)
        assert isinstance(changed, Pair)
        assert changed.first is y
        assert given.first is x
    finally:
        pytree._deregister_pytree_node(Pair)
