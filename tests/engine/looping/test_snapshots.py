"""A snapshot brings back random state and buffers, so that a run can be repeated."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pergrad.engine.looping.snapshots import (
    Snapshot,
    _is_same_state,
    random_state,
    undisturbed,
)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_a_restored_run_draws_the_same_numbers_from_torch_python_and_numpy() -> None:
    snapshot = Snapshot(nn.Linear(1, 1))
    first = drawn()
    assert drawn() != first
    snapshot.restore()
    assert drawn() == first


def test_a_restored_run_begins_with_the_same_buffers() -> None:
    model = nn.BatchNorm1d(2)
    snapshot = Snapshot(model)
    model(torch.randn(3, 2))
    assert model.running_mean.any()
    snapshot.restore()
    assert not model.running_mean.any()
    assert model.num_batches_tracked == 0


def test_the_random_state_tells_whether_numbers_were_drawn() -> None:
    before = random_state()
    assert all(torch.equal(a, b) for a, b in zip(before, random_state(), strict=True))
    torch.rand(1)
    assert not torch.equal(before[0], random_state()[0])


def test_buffers_and_random_state_are_put_back_after_an_exception() -> None:
    model = nn.BatchNorm1d(2)
    before = torch.get_rng_state()
    with pytest.raises(IndexError), undisturbed(model):
        model(torch.randn(3, 2))[5]
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.running_mean.any()
    assert model.num_batches_tracked == 0


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.rand()])
def test_snapshots_tell_whether_random_numbers_were_drawn_between_them(draw: Any) -> None:
    model = nn.Linear(1, 1)
    before = Snapshot(model)
    assert before.draws_as(Snapshot(model))
    draw()
    assert not before.draws_as(Snapshot(model))


def test_a_snapshot_from_before_numpy_was_loaded_says_nothing_of_its_numbers() -> None:
    state = np.random.get_state()
    assert _is_same_state(None, state)
    assert _is_same_state(state, None)
    assert _is_same_state(state, np.random.get_state())
    np.random.rand()
    assert not _is_same_state(state, np.random.get_state())
