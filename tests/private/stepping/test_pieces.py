"""Pieces of a batch hold every row once, whatever its structure, and padding repeats the last."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.stepping.pieces import check_rows, pieces_of


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


def batch() -> tuple[Any, ...]:
    rows = torch.arange(5)
    inner = {"mask": rows[:, None].expand(5, 2), "scale": torch.tensor(3.0), "width": 7}
    return rows, inner, Pair(rows * 2, [*"abcde"]), torch.ones(2)


def test_rows_of_all_structures_are_cut_together() -> None:
    found = [*pieces_of(batch(), 5, 2, padded=False)]
    assert [rows for rows, _ in found] == [2, 2, 1]
    for start, (rows, (x, inner, pair, other)) in zip((0, 2, 4), found, strict=True):
        assert x.tolist() == [*range(start, start + rows)]
        assert inner["mask"][:, 0].tolist() == x.tolist()
        assert (inner["scale"], inner["width"]) == (3.0, 7)
        assert pair.x.tolist() == [2 * k for k in x.tolist()]
        assert pair.names == [*"abcde"][start : start + rows]
        assert len(other) == 2  # not of the samples


def test_padding_repeats_the_last_row() -> None:
    *_, (rows, (x, _, pair, _)) = pieces_of(batch(), 5, 3, padded=True)
    assert (rows, x.tolist(), pair.names) == (2, [3, 4, 4], ["d", "e", "e"])


def test_a_batch_that_fits_is_not_touched() -> None:
    whole = batch()
    assert [*pieces_of(whole, 5, None, padded=False)] == [(5, whole)]
    assert next(pieces_of(whole, 5, 8, padded=False))[1] is whole


def test_a_batch_without_as_many_rows_is_refused() -> None:
    check_rows(batch(), 5)
    with pytest.raises(PrivacyError, match=r"drew 6 samples .* shapes \[\(5,\), \(5, 2\)"):
        check_rows(batch(), 6)
