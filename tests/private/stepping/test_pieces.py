"""Pieces of a batch hold every row once, whatever its structure, and padding repeats the last."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pergrad.errors import PrivacyError
from pergrad.private.drawing.loading import without_rows
from pergrad.private.stepping.pieces import Shared, check_rows, chosen_of, pieces_of


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


def test_mappings_keep_their_kind() -> None:
    class Tokens(UserDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            return self.data[name]

    tokens = Tokens(ids=torch.arange(5))
    pieces = [piece.ids.tolist() for _, (piece,) in pieces_of((tokens,), 5, 2, padded=False)]
    assert pieces == [[0, 1], [2, 3], [4]]
    assert without_rows(tokens).ids.tolist() == []
    assert tokens.ids.tolist() == [*range(5)]


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


def test_what_all_samples_share_is_never_cut() -> None:
    """Once it was of another length than a batch, it may be as long as one by chance."""
    shared = Shared()

    def of(size: int) -> tuple[Any, ...]:
        rows = torch.arange(size)
        return {"x": rows, "classes": torch.ones(3)}, rows, [["a", "b", "c"], rows]

    shared.see(of(5), 5, is_cut=True)
    assert shared.places == {"0.classes", "2.0"}
    for known in (shared, Shared(shared.places)):  # as a state keeps them
        known.see(of(3), 3, is_cut=True)
        found = [part for _, part in pieces_of(of(3), 3, 2, padded=False, shared=known)]
        assert [(len(a["x"]), len(a["classes"]), len(b), len(c[0])) for a, b, c in found] == [
            (2, 3, 2, 3),
            (1, 3, 1, 3),
        ]
        chosen = chosen_of(of(3), torch.tensor([True, False, True]), known)
        assert (len(chosen[0]["x"]), len(chosen[0]["classes"])) == (2, 3)


def test_what_was_cut_by_chance_is_refused() -> None:
    rows, classes = torch.arange(5), torch.ones(3)
    shared = Shared()
    shared.see((rows[:3], classes), 3, is_cut=True)
    with pytest.raises(PrivacyError, match="part 1 of the batch has 3 rows for 5 samples"):
        shared.see((rows, classes), 5, is_cut=True)
    shared = Shared()
    shared.see((rows[:1], torch.ones(1, 4)), 1, is_cut=True)  # it broadcasts
    shared.see((rows, torch.ones(1, 4)), 5, is_cut=True)
    whole = Shared()  # nothing was cut
    whole.see((rows[:3], classes), 3, is_cut=False)
    whole.see((rows, classes), 5, is_cut=False)
