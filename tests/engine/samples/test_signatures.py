"""Signatures tell apart what an answer may depend on, and are the same for calls that are."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.signatures import (
    describe,
    describe_all,
    describe_hashable,
    signature_of_call,
)
from pergrad.engine.samples.sizes import BatchSize

# Equal in Python, or equal in part, and not the same argument.
UNLIKE = [
    (1, True),
    (0, False),
    (3, BatchSize(3)),
    (slice(1, 2), slice(1, 3)),
    (slice(1), (None, 1, None)),
    ("int32", torch.int32),
]


@pytest.mark.parametrize(("one", "other"), UNLIKE, ids=str)
def test_plain_arguments_that_are_not_the_same_are_told_apart(one: Any, other: Any) -> None:
    found = []
    for value in (one, other):
        parts: list[Any] = []
        found.append(parts if describe(value, parts) else [type(value), *value])
    assert found[0] != found[1]


@pytest.mark.parametrize("value", [None, ..., 2, 1.5, "sum", slice(0, None, 2), torch.float32])
def test_description_of_a_plain_argument_is_the_same_each_time_and_can_be_hashed(
    value: Any,
) -> None:
    first: list[Any] = []
    second: list[Any] = []
    assert describe(value, first)
    assert describe(value, second)
    assert first == second
    assert hash(tuple(first)) == hash(tuple(second))


@pytest.mark.parametrize(
    "value",
    [object(), lambda x: x, {1: 2}, slice(torch.ones(()))],
    ids=["object", "function", "dict", "slice by a tensor"],
)
def test_what_is_not_plain_has_no_description(value: Any) -> None:
    assert describe(value, []) is False


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (3, BatchSize(3))], ids=str)
def test_hashable_values_are_told_apart_by_their_type(one: Any, other: Any) -> None:
    assert one == other
    parts: tuple[list[Any], list[Any]] = [], []
    assert describe_hashable(one, parts[0])
    assert describe_hashable(other, parts[1])
    assert parts[0] != parts[1]


def _signature(*args: Any, **kwargs: Any) -> Any:
    def describe_tensor(t: Tensor, parts: list[Any]) -> bool:
        parts += t.shape, t.dtype
        return t.dtype is not torch.int64

    return signature_of_call(torch.sum, 3, args, kwargs, describe_tensor, describe_hashable)


CALLS: dict[str, Any] = {
    "tensor": _signature(torch.ones(3, 2)),
    "of another shape": _signature(torch.ones(2, 3)),
    "of another dtype": _signature(torch.ones(3, 2).double()),
    "with a dimension": _signature(torch.ones(3, 2), 0),
    "with a dimension by name": _signature(torch.ones(3, 2), dim=0),
    "with another keyword": _signature(torch.ones(3, 2), axis=0),
    "keepdim": _signature(torch.ones(3, 2), 0, True),
    "one": _signature(torch.ones(3, 2), 0, 1),
    "in a list": _signature([torch.ones(3, 2)]),
    "in a tuple": _signature((torch.ones(3, 2),)),
    "nested": _signature([[0], 1]),
    "nested otherwise": _signature([[0, 1]]),
}


def test_calls_that_differ_have_signatures_of_their_own() -> None:
    assert None not in CALLS.values()
    assert len(set(CALLS.values())) == len(CALLS)


def test_values_of_tensors_are_no_part_of_a_signature() -> None:
    assert _signature(torch.ones(3, 2), [torch.zeros(1)]) == _signature(
        torch.zeros(3, 2), [torch.ones(1)]
    )


@pytest.mark.parametrize("value", [{}, [{}], torch.ones(2, dtype=torch.int64)], ids=repr)
def test_call_with_an_argument_that_has_no_description_has_no_signature(value: Any) -> None:
    assert _signature(value) is None
    assert _signature(torch.ones(1), weight=value) is None


def test_values_without_a_description_are_told_by_false() -> None:
    def no_tensor(value: object, parts: list[object]) -> bool:
        return False

    assert describe_hashable([], []) is False
    assert describe_all([torch.ones(1)], [], no_tensor, describe) is False
    assert describe_all([1, ([object()],)], [], no_tensor, describe) is False
    assert describe_all([1, ([2.0],)], [], no_tensor, describe) is True
