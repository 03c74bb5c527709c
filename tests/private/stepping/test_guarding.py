"""The optimizer of a private run applies no gradient without noise."""

from __future__ import annotations

import gc

import pytest
import torch

from pergrad.errors import PrivacyError
from tests.private.stepping.cases import data, losses, mlp, plan, run, sgd, weights


def test_an_optimizer_step_outside_of_a_private_one_is_refused() -> None:
    model = mlp()
    optimizer = sgd(model)
    step, loader = run(plan(), model, optimizer=optimizer)
    batches = iter(loader)
    step(*next(batches))
    before = weights(model)
    losses(model, *data().tensors).mean().backward()
    with pytest.raises(PrivacyError, match="with gradients that have no noise"):
        optimizer.step()
    assert torch.equal(before, weights(model))
    optimizer.zero_grad()
    optimizer.step()  # as the loop of a trainer does: it has nothing to apply
    assert torch.equal(before, weights(model))
    step(*next(batches))
    assert step.number == 2


def test_a_second_step_may_use_the_optimizer_of_a_first_one() -> None:
    model = mlp()
    optimizer = sgd(model)
    _first, _ = run(plan(), model, optimizer=optimizer)
    second, loader = run(plan(), model, optimizer=optimizer)
    second(*next(iter(loader)))
    assert second.number == 1


def test_the_optimizer_is_free_when_the_run_is_gone() -> None:
    model = mlp()
    optimizer = sgd(model)
    step, _ = run(plan(), model, optimizer=optimizer)
    del step
    gc.collect()
    losses(model, *data().tensors).mean().backward()
    optimizer.step()
