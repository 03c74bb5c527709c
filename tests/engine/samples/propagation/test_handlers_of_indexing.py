"""Every answer of the handlers that index, pick and scatter, without the probe behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.propagation.indexing import _is_shared
from tests.engine.samples.propagation.calls import Tagged, answer, call_of, rows

C = torch.ones  # a constant
ROW = (0, 1, 1)
SECOND = (1, 1, 1)
THIRD = (2, 1, 1)
Answer = Callable[[], Any]
N = slice(None)
I = torch.tensor  # noqa: E741
MASK = torch.tensor([True, False, True])


def at(t: Tagged | Tensor, *index: Any, **options: Any) -> Any:
    """t[index], where a single index is no tuple."""
    return answer(Tensor.__getitem__, t, index[0] if len(index) == 1 else index, **options)


def frozen(t: Tagged) -> Tagged:
    return Tagged(t.value.detach(), t.place)


SHARED = Tagged(torch.tensor([[1, 2]]).expand(3, 2), ROW)
COPIED = Tagged(torch.tensor([[1, 2]] * 3), ROW)

GETITEM: dict[str, tuple[Any, Answer]] = {
    "everything": (ROW, lambda: at(rows(3, 2), N)),
    "columns": (SECOND, lambda: at(rows(2, 3, dim=1), slice(1, 2))),
    "some rows": ((0, [1, 2]), lambda: at(rows(3, 2), slice(1, 3))),
    "every second row": ((0, [0, 2]), lambda: at(rows(3, 2), slice(None, None, 2))),
    "one more dimension": (SECOND, lambda: at(rows(3, 2), None)),
    "rows after an ellipsis": (SECOND, lambda: at(rows(2, 3, dim=1), ..., None)),
    "one more dimension, at the end": (ROW, lambda: at(rows(3), ..., None)),
    "last after an ellipsis": (ROW, lambda: at(rows(3, 2), ..., 0)),
    "True": (SECOND, lambda: at(rows(3, 2), True)),
    "False": ("mixed", lambda: at(rows(3, 2), False)),
    "True among others": ("mixed", lambda: at(rows(3, 2), True, 0)),
    "number before": (ROW, lambda: at(rows(2, 3, dim=1), 0)),
    "number after": (ROW, lambda: at(rows(3, 2), N, 1)),
    "one sample": ((0, [1, 1]), lambda: at(rows(3, 2), 1)),
    "one sample, by a tensor": ((0, [2, 2]), lambda: at(rows(3, 2), I(2))),
    "one sample, by numpy": ((0, [2, 2]), lambda: at(rows(3, 2), np.int64(2))),
    "one sample of a vector": ((0, [1]), lambda: at(rows(3), 1)),
    "one sample of a vector, without gradient": ("constant", lambda: at(frozen(rows(3)), 1)),
    "one sample and indices": ("cut", lambda: at(rows(3, 2), 1, I([0, 1]))),
    "one sample and indices, without gradient": (
        "constant",
        lambda: at(frozen(rows(3, 2)), 1, I([0, 1])),
    ),
    "indices of samples": ((0, [2, 0]), lambda: at(rows(3, 2), I([2, 0]))),
    "list of samples": ((0, [1, 1]), lambda: at(rows(3, 2), [1, 1])),
    "no samples": ((0, []), lambda: at(rows(3, 2), [])),
    "mask of samples": ((0, [0, 2]), lambda: at(rows(3, 2), MASK)),
    "bytes of samples": ((0, [0, 2]), lambda: at(rows(3, 2), MASK.byte())),
    "mask of two dimensions": (
        (0, [0, 2, 1]),
        lambda: at(rows(2, 3, dim=1), I([[True, False, True], [False, True, False]])),
    ),
    "mask, samples second": ((1, [0, 2]), lambda: at(rows(2, 3, dim=1), N, MASK)),
    "mask of others": (SECOND, lambda: at(rows(3, 3, dim=1), MASK)),
    "indices of others": (SECOND, lambda: at(rows(2, 3, dim=1), I([0, 1, 1]))),
    "indices of others, two dimensions": (
        THIRD,
        lambda: at(rows(2, 3, dim=1), torch.zeros(4, 5, dtype=torch.long)),
    ),
    "indices after": (ROW, lambda: at(rows(3, 2), N, torch.zeros(4, 5, dtype=torch.long))),
    "indices apart": (
        SECOND,
        lambda: at(rows(2, 3, 2, dim=1), I([0, 1, 0, 1]), N, I([0, 1, 0, 1])),
    ),
    "indices together": (ROW, lambda: at(rows(3, 2, 2), N, I([0, 1, 0, 1]), I([0, 1, 0, 1]))),
    "indices around a number": (
        ROW,
        lambda: at(rows(3, 2, 2, 2), N, I([0, 1, 0, 1]), 0, I([0, 1, 0, 1])),
    ),
    "column of samples": (
        (0, [2, 0]),
        lambda: at(rows(3, 2), I([[2], [0]]), I([[0, 1], [1, 0]])),
    ),
    "samples and others": ((0, [2, 0]), lambda: at(rows(3, 2), I([2, 0]), I([0, 1]))),
    "samples broadcast": ((1, [2, 0]), lambda: at(rows(3, 2), I([2, 0]), I([[0], [1], [0]]))),
    "samples in both directions": (
        (0, [2, 0]),
        lambda: at(rows(3), I([[2, 2, 2], [0, 0, 0]])),
    ),
    "samples in the second direction": (
        (1, [2, 0, 1]),
        lambda: at(rows(3), I([[2, 0, 1], [2, 0, 1]])),
    ),
    "one sample, two dimensions": ((1, [2]), lambda: at(rows(3), I([[2]]))),
    "samples in no direction": ("mixed", lambda: at(rows(3), I([[2, 0], [0, 2]]))),
    "shared rows": ("constant", lambda: at(SHARED, slice(0, 1))),
    "copied rows": ("constant", lambda: at(COPIED, slice(0, 1))),
    "rows that differ": (
        (0, [0]),
        lambda: at(Tagged(I([[1, 2], [1, 2], [1, 3]]), ROW), slice(0, 1)),
    ),
    "shared floats": ((0, [0]), lambda: at(frozen(rows(3, 2)), slice(0, 1))),
    "table by samples": (ROW, lambda: at(C(4, 2), rows(of=I([0, 1, 3])))),
    "table by samples, second": (SECOND, lambda: at(C(2, 4), N, rows(of=I([0, 1, 3])))),
    "table by samples, broadcast": (
        SECOND,
        lambda: at(C(4, 4), torch.zeros(2, 1, dtype=torch.long), rows(of=I([0, 1, 3]))),
    ),
    "table by a mask of samples": ((0, [0, 2]), lambda: at(C(3, 2), rows(of=MASK))),
    "table by a mask of samples, second": (
        (1, [0, 2]),
        lambda: at(C(2, 3), N, rows(of=MASK)),
    ),
    "table by samples, crosswise": (
        "mixed",
        lambda: at(C(4, 4, requires_grad=True), rows(of=I([0, 1, 3])), rows(of=I([[0], [1], [2]]))),
    ),
    "table by samples, twice": (
        ROW,
        lambda: at(C(4, 4, requires_grad=True), rows(of=I([0, 1, 3])), rows(of=I([0, 1, 2]))),
    ),
    "table by constants": ("constant", lambda: at(C(4), I([0, 1]))),
    "samples by samples": ("mixed", lambda: at(rows(3, 3), N, rows(of=I([0, 1, 2])))),
    "frozen samples by samples": (ROW, lambda: at(frozen(rows(3, 3)), rows(of=I([0, 1, 2])))),
    "aten": (
        (0, [2, 0]),
        lambda: answer(torch.ops.aten.index, rows(3, 2), [I([2, 0])]),
    ),
}

PICKING: dict[str, tuple[Any, Answer]] = {
    "select a sample": ((0, [1, 1]), lambda: answer(torch.select, rows(3, 2), 0, 1)),
    "select before": (ROW, lambda: answer(torch.select, rows(2, 3, dim=1), 0, 1)),
    "select after": (SECOND, lambda: answer(torch.select, rows(2, 3, 2, dim=1), -1, 1)),
    "select of a constant": ("constant", lambda: answer(torch.select, C(2, 3), 0, 1)),
    "narrow": ((0, [1, 2]), lambda: answer(torch.narrow, rows(3, 2), 0, 1, 2)),
    "narrow, from the end": ((0, [2]), lambda: answer(torch.narrow, rows(3, 2), -2, -1, 1)),
    "narrow of others": (SECOND, lambda: answer(torch.narrow, rows(2, 3, dim=1), 0, 1, 1)),
    "narrow to all": (ROW, lambda: answer(torch.narrow, rows(3), 0, 0, 3)),
    "index_select": ((0, [2, 0]), lambda: answer(torch.index_select, rows(3, 2), 0, I([2, 0]))),
    "index_select of others": (
        ROW,
        lambda: answer(torch.index_select, rows(3, 2), 1, I([1, 0, 0])),
    ),
    "index_select by samples": (
        SECOND,
        lambda: answer(torch.index_select, C(2, 4), 1, rows(of=I([0, 1, 3]))),
    ),
    "gather": (
        ROW,
        lambda: answer(torch.gather, rows(3, 2), 1, torch.zeros(3, 4, dtype=torch.long)),
    ),
    "gather, fewer rows": (
        None,
        lambda: answer(torch.gather, rows(3, 2), -1, torch.zeros(2, 4, dtype=torch.long)),
    ),
    "gather of a constant": (
        ROW,
        lambda: answer(torch.gather, C(3, 2), 1, rows(of=torch.zeros(3, 1, dtype=torch.long))),
    ),
    "gather of samples": ((0, [2, 0]), lambda: answer(torch.gather, rows(3), 0, I([2, 0]))),
    "gather of one sample": (
        (0, [0, 0, 0]),
        lambda: answer(torch.gather, rows(3, 2), 0, torch.zeros(3, 2, dtype=torch.long)),
    ),
    "gather across samples": (
        "mixed",
        lambda: answer(torch.gather, rows(3, 2), 0, I([[0, 1], [1, 2]])),
    ),
    "take along": (
        ROW,
        lambda: answer(torch.take_along_dim, rows(3, 2), torch.zeros(3, 1, dtype=torch.long), 1),
    ),
    "take of all": (
        None,
        lambda: answer(torch.take_along_dim, rows(3, 2), torch.zeros(3, dtype=torch.long)),
    ),
    "masked": (
        (0, [0, 0, 2, 2]),
        lambda: answer(torch.masked_select, rows(3, 2), MASK.view(3, 1)),
    ),
    "masked, samples second": (
        (0, [0, 2, 0, 2]),
        lambda: answer(torch.masked_select, rows(2, 3, dim=1), MASK),
    ),
    "masked by samples": (
        (0, [0, 2, 0, 2]),
        lambda: answer(torch.masked_select, C(2, 3), rows(of=MASK)),
    ),
    "masked constant": ("constant", lambda: answer(torch.masked_select, C(3), MASK)),
    "nonzero": (
        (0, [0, 2, 2]),
        lambda: answer(torch.nonzero, rows(of=I([[1, 0], [0, 0], [1, 1]]))),
    ),
    "nonzero, samples second": (
        (0, [0, 2, 1]),
        lambda: answer(torch.nonzero, rows(of=I([[1, 0, 1], [0, 1, 0]]), dim=1)),
    ),
    "nonzero as a tuple": (
        (0, [0, 2, 1]),
        lambda: answer(torch.nonzero, rows(of=I([[1, 0, 1], [0, 1, 0]]), dim=1), as_tuple=True),
    ),
    "nonzero of a constant": ("constant", lambda: answer(torch.nonzero, C(2))),
    "where, one": ((0, [0, 2]), lambda: answer(torch.where, rows(of=MASK))),
    "where, three": (ROW, lambda: answer(torch.where, MASK.view(3, 1), rows(3, 2), C(2).double())),
    "masked_scatter": (
        ROW,
        lambda: answer(torch.masked_scatter, rows(3), MASK, rows(2, owners=[0, 2])),
    ),
    "masked_scatter, rows": (
        ROW,
        lambda: answer(
            torch.masked_scatter, rows(3, 2), MASK.view(3, 1), rows(3, 2, owners=[0, 2, 1])
        ),
    ),
    "masked_scatter of others": (
        (0, [2, 1, 0]),
        lambda: answer(torch.masked_scatter, rows(3), MASK, rows(2, owners=[2, 0])),
    ),
    "masked_scatter of a constant": (
        ROW,
        lambda: answer(torch.masked_scatter, rows(3), MASK, C(2).double()),
    ),
    "masked_scatter into a constant": (
        (0, [0, 1, 2]),
        lambda: answer(torch.masked_scatter, C(3).double(), MASK, rows(2, owners=[0, 2])),
    ),
}

ZEROS = torch.zeros(3, 1, dtype=torch.long)
SCATTER: dict[str, tuple[Any, Answer]] = {
    "along others": (ROW, lambda: answer(torch.scatter_add, rows(3, 2), 1, ZEROS, rows(3, 1))),
    "into a constant": (
        ROW,
        lambda: answer(torch.scatter_add, C(3, 2).double(), -1, ZEROS, rows(3, 1)),
    ),
    "of a constant": (
        ROW,
        lambda: answer(torch.scatter_add, rows(3, 2), 1, ZEROS, C(3, 1).double()),
    ),
    "at the samples' places": (
        ROW,
        lambda: answer(torch.scatter, C(3, 2).double(), 1, rows(of=ZEROS), 1.0),
    ),
    "of a number": (ROW, lambda: answer(torch.scatter, rows(3, 2), 1, ZEROS, 1.0)),
    "into more rows": (
        "cut",
        lambda: answer(torch.scatter_add, C(4, 2).double(), 1, ZEROS, rows(3, 1)),
    ),
    "into others": (
        "mixed",
        lambda: answer(torch.scatter_add, rows(3, 2, owners=[1, 0, 2]), 1, ZEROS, rows(3, 1)),
    ),
    "along samples": (
        "mixed",
        lambda: answer(torch.scatter_add, rows(3, 1), 0, ZEROS, rows(3, 1)),
    ),
    "rows where they belong": (
        ROW,
        lambda: answer(torch.index_add, rows(3, 2), 0, I([2, 0]), rows(2, 2, owners=[2, 0])),
    ),
    "rows where others are": (
        "mixed",
        lambda: answer(torch.index_add, rows(3, 2), 0, I([0, 2]), rows(2, 2, owners=[2, 0])),
    ),
    "rows where samples are columns": (
        "mixed",
        lambda: answer(torch.index_add, rows(3, 3, dim=1), 0, I([0, 1, 2]), rows(3, 3)),
    ),
    "rows of a constant": (
        (0, [2, 0, 1]),
        lambda: answer(torch.index_copy, C(3, 2).double(), 0, I([1, 2, 0]), rows(3, 2)),
    ),
    "some rows of a constant": (
        "cut",
        lambda: answer(torch.index_copy, C(4, 2).double(), 0, I([1, 2, 0]), rows(3, 2)),
    ),
}


CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("getitem", GETITEM),
        ("picking", PICKING),
        ("scatter", SCATTER),
    )
    for name, case in cases.items()
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_handler_by_itself_tells_where_the_samples_are(name: str) -> None:
    expected, find = CASES[name]
    assert find() == expected


def is_shared(t: Tensor, dim: int) -> bool:
    """The answer; one that was read from values must say so, or it would be kept for other values."""
    call = call_of(torch.neg, rows(3))
    found = _is_shared(call, t, dim)
    assert call.reads_values or not found
    return found


def test_rows_are_shared_where_all_samples_have_the_same_integers() -> None:
    assert is_shared(SHARED.value, 0) is True
    assert is_shared(COPIED.value, 0) is True
    assert is_shared(COPIED.value, 1) is False
    assert is_shared(C(3, 2), 0) is False
    assert is_shared(C(3, 2, dtype=torch.complex64), 0) is False
    assert is_shared(torch.ones(1, 2, dtype=torch.long), 0) is False
    assert is_shared(torch.ones(2, 2, dtype=torch.long), 0) is True
