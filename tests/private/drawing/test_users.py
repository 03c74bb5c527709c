"""Items of users: a plan over them protects all samples of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pergrad.errors import PrivacyError
from pergrad.private import UserDataset, sensitivities
from tests.private.stepping.cases import data, losses, mlp, plan, run, weights


def test_a_user_s_samples_are_drawn_or_repeated() -> None:
    found = UserDataset(TensorDataset(torch.arange(9)), [0, 1, 1, 0, 1, 1, 1, 2, 1], samples=3)
    assert len(found) == 3
    assert found[0][0].tolist() == [0, 3, 0]
    assert found[2][0].tolist() == [7, 7, 7]
    drawn = {tuple(sorted(found[1][0].tolist())) for _ in range(50)}
    assert len(drawn) > 5
    assert all(len({*rows}) == 3 and {*rows} <= {1, 2, 4, 5, 6, 8} for rows in drawn)


def test_removing_a_user_moves_the_sum_by_the_bound_at_most() -> None:
    x, y = data().tensors
    users = UserDataset(TensorDataset(100 * x, y), torch.arange(40) % 8, samples=5)

    def of_users(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x.flatten(0, 1), y.flatten()).view(len(x), -1)

    model = mlp()
    made = plan(sample_rate=0.9, expected_batch_size=7)
    step, loader = run(made, model, of_users, users, views=True)
    before = weights(model)
    for batch in loader:
        step(*batch)
        assert batch[0].shape[1:] == (5, 4)
    assert (weights(model) != before).all()
    rows = [users[k] for k in range(8)]
    whole = [torch.stack(part) for part in zip(*rows, strict=True)]
    assert sensitivities(step.clipped_sums, *whole).max() <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("users", "samples", "reason"),
    [
        ([1, 2], 1, "each of 3 samples, got 2"),
        ([1, 2, 3], 0, "samples must be"),
        ([1, 2, 3], True, "samples must be"),
    ],
)
def test_bad_arguments_are_refused(users: Any, samples: Any, reason: str) -> None:
    with pytest.raises(PrivacyError, match=reason):
        UserDataset(TensorDataset(torch.arange(3)), users, samples)
