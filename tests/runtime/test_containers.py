"""Containers are copied, compared and searched at all depths; tensors are compared by identity only."""

import gc
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.runtime.containers import (
    is_same,
    map_parts,
    owned_copy,
    parts_of,
    refilled,
    skeleton,
    tensors_in,
)

T = torch.ones(2)
VALUES: list[Any] = [
    [1, [T, {"a": T}]],
    {"a": {"b": [T]}},
    OrderedDict(a=[T]),
    defaultdict(list, a=[T]),
    deque([[T], 2], maxlen=3),
    {1, 2},
    (T, [T]),
    "text",
    None,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_copy_has_its_own_containers_and_the_same_tensors(value: Any) -> None:
    own = owned_copy(value)
    assert is_same(own, value)
    assert skeleton(own) == skeleton(value)
    assert all(t is T for t in tensors_in(own))
    assert len(list(tensors_in(own))) == len(list(tensors_in(value)))
    if isinstance(value, list | dict | deque | set):
        assert own is not value
        own.clear()
        assert value
        assert not is_same(own, value)


def test_a_bounded_deque_stays_bounded() -> None:
    assert owned_copy(deque([1], maxlen=3)).maxlen == 3


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([T], [T.clone()]),
        ([1], (1,)),
        ([1], [1.5]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({T}, {T.clone()}),
        (object(), object()),
        (1, True),
    ],
)
def test_other_objects_are_not_the_same(a: Any, b: Any) -> None:
    assert not is_same(a, b)


def test_a_skeleton_has_no_tensor_and_shows_growth() -> None:
    assert list(tensors_in([skeleton(value) for value in VALUES])) == []
    assert skeleton([T]) == skeleton([T * 2])
    assert skeleton([T]) != skeleton([T, T])
    assert skeleton({"a": 1}) != skeleton({"a": 2})
    assert skeleton({T}) != skeleton({T, T.clone()})


def test_tensors_in_attributes_of_objects_are_found_in_spite_of_cycles() -> None:
    holder: Any = type("Holder", (), {})()
    holder.own, holder.all = holder, [{"t": T}]
    assert [id(t) for t in tensors_in((holder, holder))] == [id(T)]
    assert isinstance(next(tensors_in(holder)), Tensor)


PYTREES: list[Any] = [
    [1, (T, {"a": None, "b": [T.shape, slice(0, T, None)]})],
    torch.sort(T),
    OrderedDict(a=[T], b=(T,)),
    T,
    [],
]


@pytest.mark.parametrize("value", PYTREES, ids=repr)
def test_leaves_are_mapped_in_order_and_containers_keep_their_kinds(value: Any) -> None:
    parts = parts_of(value)
    again = refilled(value, parts)
    assert type(again) is type(value)
    assert [id(part) for part in parts_of(again)] == [id(part) for part in parts]
    names = refilled(value, map(str, range(len(parts))))
    assert parts_of(names) == [str(k) for k in range(len(parts))]
    assert parts_of(map_parts(lambda _: 7, value)) == [7] * len(parts)


def test_mapping_leaves_no_garbage() -> None:
    gc.collect()
    for _ in range(5):
        refilled(PYTREES[0], parts_of(PYTREES[0]))
    assert gc.collect() == 0


OPENED: list[Any] = [*VALUES[:5], VALUES[6], torch.Size([2, 3]), slice(1, T), torch.sort(T)]


@pytest.mark.parametrize("value", OPENED, ids=repr)
def test_the_leaves_are_those_that_are_mapped(value: Any) -> None:
    seen: list[Any] = []

    def see(part: Any) -> Any:
        seen.append(part)
        return part

    map_parts(see, value)
    assert list(map(id, parts_of(value))) == list(map(id, seen))


def test_listing_the_leaves_of_any_container_leaves_no_garbage() -> None:
    gc.collect()
    for _ in range(10):
        parts_of(OrderedDict(a=[T], b=deque([T])))
    assert gc.collect() == 0
