"""Every answer of the handlers that write, join, split and create, without the probe behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Owners, Scope, Unfinished
from pergrad.engine.samples.propagation import Call, layouts_of_outputs
from pergrad.engine.samples.propagation.writing import (
    layout_after_unfinished,
    layout_after_write,
)
from pergrad.engine.samples.sizes import BatchSize
from pergrad.rules.samples import are_samples, carry_samples
from tests.engine.samples.propagation.calls import Tagged, answer, call_of, described, named, rows

C = torch.ones  # a constant
ROW = (0, 1, 1)
SECOND = (1, 1, 1)
Answer = Callable[[], Any]
N = slice(None)
I = torch.tensor  # noqa: E741


def frozen(t: Tagged) -> Tagged:
    return Tagged(t.value.detach(), t.place)


def written(t: Tagged | Tensor, index: Any, value: Any, *, before: Any = None) -> Any:
    """The layout after t[index] = value."""
    output = torch.ones(1, requires_grad=True) * 1
    call = call_of(Tensor.__setitem__, t, index, value, outputs=[output])
    if before is not None:
        call.layouts[0] = Unfinished(call.scope, "half", "cut", before[0], I(before[1]))
    found = layout_after_write(call)
    if isinstance(found, Unfinished):
        assert "writes samples into part of a constant" in found.reason
        return "unfinished", found.dim, found.owner.tolist()  # type: ignore[union-attr]
    return described(found)


W = torch.zeros  # a constant written to
WRITING: dict[str, tuple[Any, Answer]] = {
    "a number": (ROW, lambda: written(frozen(rows(3, 2)), 0, 1.0)),
    "a constant": (ROW, lambda: written(frozen(rows(3, 2)), 0, C(2))),
    "rows over rows": (ROW, lambda: written(frozen(rows(3, 2)), N, rows(3, 2))),
    "a column": (ROW, lambda: written(frozen(rows(3, 2)), (N, 0), rows(3))),
    "a column of others": (
        (0, [1, 0, 2]),  # the rest is data
        lambda: written(frozen(rows(3, 2)), (N, 0), rows(3, owners=[1, 0, 2])),
    ),
    "some rows": (
        ROW,
        lambda: written(frozen(rows(3, 2)), slice(0, 2), rows(2, 2, owners=[0, 1])),
    ),
    "another sample": (
        (0, [2, 1, 2]),
        lambda: written(frozen(rows(3, 2)), slice(0, 1), rows(1, 2, owners=[2])),
    ),
    "one row over all": (
        (0, [0, 0, 0]),
        lambda: written(frozen(rows(3, 2)), N, rows(1, 2, owners=[0])),
    ),
    "samples where one was": ("mixed", lambda: written(frozen(rows(3, 3)), 0, rows(1, 3))),
    "more dimensions than the place has": (
        "mixed",
        lambda: written(frozen(rows(3, 2)), (0, N), rows(1, 2, owners=[0])),
    ),
    "into a constant": (ROW, lambda: written(W(3, 2), N, rows(3, 2))),
    "into a constant's column": (ROW, lambda: written(W(3, 2), (N, 1), rows(3))),
    "into a constant's rows": (SECOND, lambda: written(W(2, 3), 1, rows(3))),
    "into a constant's rows, two": (SECOND, lambda: written(W(2, 3), N, rows(3))),
    "into part of a constant": (
        ("unfinished", 0, [-1, 0, 1, 2]),
        lambda: written(W(4, 2), slice(1, 4), rows(3, 2)),
    ),
    "into part of a constant's columns": (
        ("unfinished", 1, [0, 1, 2, -1]),
        lambda: written(W(2, 4), (N, slice(0, 3)), rows(2, 3, dim=1)),
    ),
    "into part of part of a constant": (
        ("unfinished", 0, [-1, 0, 1, 2]),
        lambda: written(W(4, 2), (slice(1, 4), slice(0, 1)), rows(3, 1)),
    ),
    "the rest": (
        (0, [2, 0, 1, 2]),
        lambda: written(W(4, 2), slice(1, 4), rows(3, 2), before=(0, [2, -1, -1, -1])),
    ),
    "more of it": (
        ("unfinished", 0, [2, 0, 1, 2, -1]),
        lambda: written(W(5, 2), slice(1, 4), rows(3, 2), before=(0, [2, -1, -1, -1, -1])),
    ),
    "part of what was filled along another dimension": (
        "mixed",
        lambda: written(W(5, 4), slice(1, 4), rows(3, 4), before=(1, [2, 0, 2, 1])),
    ),
    "what was filled along another dimension, but one part": (
        (0, [2, 0, 1, 2]),
        lambda: written(W(4, 4), slice(1, 4), rows(3, 4), before=(1, [2, -1, -1, -1])),
    ),
    "by indices": ((0, [0, 2, 1]), lambda: written(W(3, 2), I([0, 2, 1]), rows(3, 2))),
}

JOINING: dict[str, tuple[Any, Answer]] = {
    "cat of others": (ROW, lambda: answer(torch.cat, [rows(3, 2), C(3, 1)], 1)),
    "cat of others, negative": (ROW, lambda: answer(torch.cat, [rows(3, 2), C(3, 1)], dim=-1)),
    "cat of samples": ((0, 2, 1), lambda: answer(torch.cat, [rows(3, 2), rows(3, 2)])),
    "cat of samples, and nothing": ((0, 2, 1), lambda: answer(torch.cat, [rows(3), C(0), rows(3)])),
    "cat of blocks": (
        (0, [0, 0, 1, 1, 2, 2, 0, 1, 2]),
        lambda: answer(torch.cat, [rows(6, post=2), rows(3)]),
    ),
    "cat with a constant": ("cut", lambda: answer(torch.cat, [rows(3, 2), C(1, 2)])),
    "cat with an empty matrix": (ROW, lambda: answer(torch.cat, [rows(3, 2), C(0, 2)])),
    "cat of two places": ("mixed", lambda: answer(torch.cat, [rows(3, 3), rows(3, 3, dim=1)])),
    "stack": (SECOND, lambda: answer(torch.stack, [rows(3, 2), C(3, 2)])),
    "stack behind": (ROW, lambda: answer(torch.stack, [rows(3, 2), C(3, 2)], 1)),
    "stack at the end": (SECOND, lambda: answer(torch.stack, [rows(2, 3, dim=1)] * 2, -1)),
    "stack of single samples": (
        (1, [2, 0]),
        lambda: answer(torch.stack, [rows(2, owners=[2, 2]), rows(2, owners=[0, 0])], dim=1),
    ),
    "stack of one sample": (
        (1, [2, 2]),
        lambda: answer(torch.stack, [Tagged(C(2), (0, [2, 2]))]),
    ),
    "stack of several samples each": (
        "mixed",
        lambda: answer(torch.stack, [rows(2, owners=[2, 0]), rows(2, owners=[0, 2])]),
    ),
    "split of samples": (
        [(0, [0, 1]), (0, [2])],
        lambda: answer(torch.split, rows(3, 2), 2),
    ),
    "split of columns": ([SECOND], lambda: [answer(torch.split, rows(2, 3, dim=1), 1, 0)]),
    "split from the end": (
        [(1, [0]), (1, [1, 2])],
        lambda: answer(torch.split, rows(2, 3, dim=1), [1, 2], -1),
    ),
    "split of a constant": ("constant", lambda: answer(torch.split, C(3), 2)),
    "unbind samples": (
        [(0, [0, 0]), (0, [1, 1]), (0, [2, 2])],
        lambda: answer(torch.unbind, rows(3, 2)),
    ),
    "unbind others": (ROW, lambda: answer(torch.unbind, rows(2, 3, dim=1))),
    "unbind later ones": (ROW, lambda: answer(torch.unbind, rows(3, 2), -1)),
    "unbind a constant": ("constant", lambda: answer(torch.unbind, C(3))),
    "pack": (
        [(0, [0, 1, 2, 0, 1]), "constant"],
        lambda: answer(torch._pack_padded_sequence, rows(2, 3, 4, dim=1), I([2, 2, 1]), False),
    ),
    "pack of a constant": (
        ["constant", "constant"],
        lambda: answer(torch._pack_padded_sequence, C(3, 2), I([2, 1, 1]), True),
    ),
}
PACKED = {
    f"pad {where}": (
        [expected, "constant"],
        lambda data=data, first=first: answer(
            torch._pad_packed_sequence, data, I([3, 2]), first, 0.0, 2
        ),
    )
    for where, expected, data, first in (
        ("batch first", (0, [1, 2, 0]), rows(5, 4, owners=[1, 2, 0, 1, 2]), True),
        ("batch second", (1, [1, 2, 0]), rows(5, 4, owners=[1, 2, 0, 1, 2]), False),
        ("constant", "constant", C(5, 4), True),
    )
}

B3, B6 = BatchSize(3), BatchSize(6)
CREATING: dict[str, tuple[Any, Answer]] = {
    "first": (ROW, lambda: answer(Tensor.new_zeros, rows(3), (B3, 3))),
    "second": (SECOND, lambda: answer(Tensor.new_zeros, rows(3), (3, B3))),
    "as arguments": (SECOND, lambda: answer(Tensor.new_zeros, rows(3), 3, B3)),
    "multiple": ((0, 1, 2), lambda: answer(Tensor.new_ones, rows(3), (B6, 3))),
    "by name": (SECOND, lambda: answer(Tensor.new_full, rows(3), size=(2, B3), fill_value=1.0)),
    "not found": (
        SECOND,
        lambda: answer(named("new_zeros"), rows(3), [[B3]], outputs=[C(2, 3)]),
    ),
    "empty": ("constant", lambda: answer(Tensor.new_zeros, rows(3), (BatchSize(0), 3))),
    "no multiple": ("constant", lambda: answer(Tensor.new_zeros, rows(3), (BatchSize(4), 3))),
    "no size of samples": ("constant", lambda: answer(Tensor.new_zeros, rows(3), (3, 3))),
}


CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("writing", WRITING),
        ("joining", JOINING),
        ("padding", PACKED),
        ("creating", CREATING),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_handler_by_itself_tells_where_the_samples_are(name: str) -> None:
    expected, find = CASES[name]
    assert find() == expected


def told(func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return described(layouts_of_outputs(call_of(func, *args, **options)))


def combined(func: Callable[..., Any], *args: Any, why: str, with_rows: bool = False) -> Any:
    """The layouts of func(t, *args) where t has lost its samples."""
    t = torch.ones(2, requires_grad=True) * 1
    given = [rows(3, 2)] if with_rows else []
    call = call_of(func, t, *args, *given)
    call.layouts[0] = call.scope.lost("lost", why)  # type: ignore[arg-type]
    return described(layouts_of_outputs(call))


def test_loss_may_be_scaled_and_summed_but_not_meet_samples() -> None:
    assert combined(torch.add, 1.0, why="total") == ["total"]
    assert combined(torch.sum, why="total") == ["total"]
    assert combined(torch.exp, why="total") == ["mixed"]
    assert combined(torch.mul, why="total", with_rows=True) == ["mixed"]
    square = torch.ones(2, requires_grad=True) * 1
    call = call_of(torch.mul, square, square)
    call.layouts = [call.scope.lost("loss", "total")] * 2
    assert described(layouts_of_outputs(call)) == ["mixed"]
    call = call_of(torch.add, square, square)
    call.layouts = [call.scope.lost("loss", "total")] * 2
    assert described(layouts_of_outputs(call)) == ["total"]


def test_elements_without_a_place_may_be_moved_and_summed_alone() -> None:
    assert combined(torch.exp, why="cut") == ["cut"]
    assert combined(torch.reshape, (1, 2), why="cut") == ["cut"]
    assert combined(torch.sum, why="cut") == ["total"]
    assert combined(torch.mean, why="cut") == ["total"]
    assert combined(torch.cumsum, 0, why="cut") == ["mixed"]
    assert combined(torch.add, C(2), why="cut") == ["mixed"]
    assert combined(torch.mul, why="cut", with_rows=True) == ["mixed"]


@pytest.mark.parametrize("why", ["mixed", "unknown"])
@pytest.mark.parametrize("func", [torch.exp, torch.sum, torch.mul], ids=lambda f: f.__name__)
def test_nothing_is_known_after_samples_that_have_met_or_may_have(func: Any, why: str) -> None:
    assert combined(func, why=why, with_rows=func is torch.mul) == [why]


def test_result_of_another_shape_than_its_layout_is_lost() -> None:
    output = torch.ones(2, 4, requires_grad=True) * 1
    assert told(carry_samples, C(4, 2, requires_grad=True), rows(3), outputs=[output]) == [
        "unknown"
    ]
    assert told(carry_samples, C(3, 2), rows(3)) == [ROW]
    assert told(carry_samples, C(3), rows(2, 3, dim=1), flows=True) == ["unknown"]
    assert told(carry_samples, C(3), rows(2, 3, dim=1)) == ["constant"]  # data


def test_declared_samples_are_rows_if_there_are_as_many() -> None:
    assert told(are_samples, C(3, 2)) == [ROW]
    assert told(are_samples, C(4, 2)) == ["constant"]
    assert told(are_samples, rows(2, 3, dim=1)) == [SECOND]


def test_owners_of_unfinished_tensors_are_copied() -> None:
    scope, owner = Scope(3), torch.tensor([2, -1, -1, -1])
    t, value = W(4, 2), torch.ones(3, 2, requires_grad=True)
    out = torch.ones(1, requires_grad=True) * 1
    before = Unfinished(scope, "half", "cut", 0, owner)
    args = (t, slice(1, 4), value)
    layouts = [before, scope.samples(0)]
    found = layout_after_write(
        Call(scope, Tensor.__setitem__, args, {}, [out], [t, value], layouts)
    )
    assert isinstance(found, Owners)
    assert owner.tolist() == [2, -1, -1, -1]


def unfinished_of(
    func: Callable[..., Any], t: Tensor, owners: list[int], *args: Any, **kw: Any
) -> Any:
    """The layout of a function of a tensor whose rows have these owners, -1 for those that are constant."""
    call = call_of(func, t, *args, flows=True, **kw)
    k = next(k for k, own in enumerate(call.tensors) if own is t)
    call.layouts[k] = Unfinished(call.scope, "half", "cut", 0, I(owners))
    found = layout_after_unfinished(call)
    if isinstance(found, Unfinished):
        assert found.owner is not None
        return "unfinished", found.dim, found.owner.tolist()
    return described(found)


UNKNOWN: dict[str, tuple[Any, Answer]] = {
    "gather by fewer dimensions": (
        None,
        lambda: answer(torch.gather, rows(3), 0, I(0)),
    ),
    "gather of nothing": (
        None,
        lambda: answer(torch.gather, rows(3, 2), 0, torch.zeros(0, 2, dtype=torch.long)),
    ),
    "scatter into a scalar": (
        None,
        lambda: answer(torch.scatter, torch.zeros(()), 0, I(0), torch.ones(())),
    ),
    "nothing scattered into samples": (
        (0, 1, 1),
        lambda: answer(
            torch.index_add, rows(3, 2), 0, I([], dtype=torch.long), rows(0, 2, owners=[])
        ),
    ),
    "nothing written into samples": (
        (0, 1, 1),
        lambda: written(rows(3, 2), I([], dtype=torch.long), rows(0, 2, owners=[])),
    ),
    "written by a Python bool": ("mixed", lambda: written(rows(3, 2), True, rows(3, 2))),
    "constants put into samples": (
        (0, 1, 1),
        lambda: answer(torch.index_put, rows(3, 2), (I([0]),), C(1, 2).double(), True),
    ),
    "put by two indices": (
        None,
        lambda: answer(torch.index_put, rows(3, 2), (I([0, 1, 2]), I([0, 1, 1])), rows(3), True),
    ),
    "two samples put into one row": (
        "mixed",
        lambda: answer(torch.index_put, C(3, 2).double(), (I([0, 0, 1]),), rows(3, 2), True),
    ),
    "masked scatter that broadcasts": (
        None,
        lambda: answer(torch.masked_scatter, C(2).double(), C(3, 2).bool(), rows(3, 2)),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_write_leaves_open_is_not_guessed(name: str) -> None:
    expected, found = UNKNOWN[name]
    assert found() == expected


UNFINISHED: dict[str, tuple[Any, Answer]] = {
    "elementwise": (("unfinished", 0, [0, -1]), lambda: unfinished_of(torch.exp, W(2, 2), [0, -1])),
    "with those of others": (
        (0, [0, 2]),
        lambda: unfinished_of(torch.add, W(2, 2), [0, -1], rows(2, 2, owners=[0, 2])),
    ),
    "with those of other samples": (
        None,
        lambda: unfinished_of(torch.add, W(2, 2), [0, -1], rows(2, 2, owners=[1, 2])),
    ),
    "with samples in another dimension": (
        None,
        lambda: unfinished_of(torch.add, W(2, 3), [0, -1], rows(2, 3, dim=1)),
    ),
    "with fewer rows": (
        None,
        lambda: unfinished_of(torch.add, W(2, 2), [0, -1], rows(1, 2, owners=[0])),
    ),
    "a function that is none of these": (
        None,
        lambda: unfinished_of(torch.cumsum, W(2, 2), [0, -1], 0),
    ),
    "another number of rows": (None, lambda: unfinished_of(torch.exp, W(3, 2), [0, -1])),
    "added to rows of their own": (
        (0, [2, 0, 1]),
        lambda: unfinished_of_source([2, 0, 1, -1], 0, I([0, 1, 2, 1])),
    ),
    "added along another dimension": (
        None,
        lambda: unfinished_of_source([0, 1, 2, -1], 1, I([0, 1])),
    ),
}


def unfinished_of_source(owners: list[int], dim: int, index: Tensor) -> Any:
    """The layout of rows of a constant to which those of a tensor with constant rows are added."""
    source, t = W(4, 2), W(4, 3) if dim else W(3, 2)
    call = call_of(torch.index_add, t, dim, index, source, flows=True)
    call.layouts[2] = Unfinished(call.scope, "half", "cut", 0, I(owners))
    assert call.tensors[2] is source
    return described(layout_after_unfinished(call))


@pytest.mark.parametrize("name", UNFINISHED)
def test_constant_rows_belong_to_whom_they_are_combined_with(name: str) -> None:
    expected, found = UNFINISHED[name]
    assert found() == expected


def test_a_tensor_with_constant_rows_through_which_nothing_flows_is_unknown() -> None:
    t = W(2, 2)
    call = call_of(torch.exp, t, flows=False)
    call.layouts[0] = Unfinished(call.scope, "half", "cut", 0, I([0, -1]))
    assert layout_after_unfinished(call) is None
