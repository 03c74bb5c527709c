"""Copies arrive whole, and batches are left alone where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from pergrad.index.rows.transferring import Transfer, pinned


def test_tensors_on_the_cpu_arrive_as_they_are() -> None:
    given = [torch.arange(3), torch.ones(2, 2, requires_grad=True)]
    found = Transfer(given).arrived()
    assert [t.data_ptr() for t in found] == [t.data_ptr() for t in given]
    assert not any(t.requires_grad for t in found)
    assert Transfer([]).arrived() == []


def test_a_batch_for_the_cpu_is_not_copied() -> None:
    batch = (torch.ones(2), {"a": torch.ones(3)}, "text")
    assert pinned(batch, torch.device("cpu")) is batch


@pytest.mark.gpu
def test_copies_of_a_gpu_hold_what_was_computed_before_them() -> None:
    big = torch.full((2048, 2048), 2.0, device="cuda")
    result = (big @ big).sum(1)  # still running when the copy begins
    transfer = Transfer([result, torch.ones(1)])
    result.zero_()  # later in the stream
    found, own = transfer.arrived()
    assert not found.is_cuda
    assert found.unique().tolist() == [4 * 2048 * 2048]
    assert own.tolist() == [1]


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned_in_containers() -> None:
    x, held, text = pinned((torch.ones(2), {"a": torch.ones(3)}, "text"), torch.device("cuda"))
    assert x.is_pinned()
    assert held["a"].is_pinned()
    assert text == "text"
