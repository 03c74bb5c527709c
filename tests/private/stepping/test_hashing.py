"""A hash tells tensors apart by every number and its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pergrad.private.stepping.hashing import hashed


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool],
)
def test_the_same_numbers_have_the_same_hash_whatever_their_strides(dtype: torch.dtype) -> None:
    t = (10 * drawn(7, 5)).to(dtype)
    assert hashed(t) == hashed(t.t().contiguous().t())


def test_numbers_that_change_places_have_another_hash() -> None:
    t = drawn(6, 4)
    assert hashed(t) != hashed(t.flip(0))


def test_numbers_that_come_twice_are_not_lost() -> None:
    a, b = drawn(2, 6, 4)
    assert hashed(torch.cat([a, a])) != hashed(torch.cat([b, b]))
    assert hashed(torch.cat([a, -a])) != hashed(torch.cat([b, -b]))


def test_a_changed_bit_in_any_chunk_changes_the_hash() -> None:
    t = torch.zeros((1 << 20) + 3)
    found = {int(hashed(t))}
    for place in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 2):
        t.zero_()
        t[place] = 1e-45
        found.add(int(hashed(t)))
    assert len(found) == 6


def test_sparse_tensors_and_empty_ones_have_a_hash() -> None:
    assert hashed(torch.zeros(0)) == 0
    assert hashed(drawn(3, 3).to_sparse()) == hashed(drawn(3, 3).to_sparse())
