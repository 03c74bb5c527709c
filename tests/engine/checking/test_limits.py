"""Numbers that reports and checks promise: how many samples run alone, and how many are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.checking.comparison import spread_out
from pergrad.engine.checking.trial import Trial


def test_samples_that_run_alone_are_spread_from_first_to_last() -> None:
    assert spread_out(4, 10) == (0, 3, 6, 9)
    assert spread_out(1, 10) == (0,)
    assert spread_out(2, 10) == (0, 9)
    assert spread_out(4, 2) == (0, 1)
    assert spread_out(4, 1) == (0,)


class Centred(nn.Module):
    """Mixes samples by value, past the recorder's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.detach().mean(0))


def test_eight_of_the_mixed_samples_are_named() -> None:
    x = torch.rand(12, 2, dtype=torch.float64)
    report = pergrad.verify(Centred(), lambda m, x: m(x).sum(1), x, quiet=True)
    assert not report.ok
    assert any("[1, 2, 3, 4, 5, 6, 7, 8]" in problem for problem in report.problems)


def test_step_check_runs_four_samples_alone_twice_each() -> None:
    sizes: list[int] = []
    model = nn.Linear(2, 1)
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    with pergrad.record(model, pergrad.Norms(), verify=True):
        model(torch.rand(9, 2)).sum().backward()
    assert sizes == [9] + [1] * 8


def trial(*batch: Tensor, batch_first: bool = True) -> Trial:
    return Trial(nn.Linear(2, 1), lambda m, *b: m(b[0]), batch, None, "sum", batch_first)


def test_samples_are_cut_copied_and_spoilt_where_they_are() -> None:
    x, y, other = torch.arange(6.0).view(3, 2), torch.tensor([5, 6, 7]), torch.ones(2)
    run = trial(x, y, other)
    cut = run.sample(1, 3)
    assert [t.tolist() for t in cut] == [[[2, 3]], [6], [1, 1]]
    copied = run.with_copy(0, 3)
    assert copied is not None
    assert [t.tolist() for t in copied] == [[[2, 3], [2, 3], [4, 5]], [6, 6, 7], [1, 1]]
    spoilt = run.spoilt(1, 3)
    assert spoilt is not None
    assert spoilt[0].isnan().any(1).tolist() == [False, True, False]
    assert spoilt[1].tolist() == [5, 6, 7]
    assert not x.isnan().any()
    assert trial(y).spoilt(0, 3) is None
    assert trial(torch.ones(3, 2)).with_copy(0, 3) is None


def test_samples_in_the_second_dimension_are_first_in_vectors() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.tensor([5, 6, 7])
    cut = trial(x, y, batch_first=False).sample(2, 3)
    assert [t.tolist() for t in cut] == [[[2], [5]], [7]]
    square = trial(torch.arange(4.0).view(2, 2), batch_first=False).sample(1, 2)
    assert square[0].tolist() == [[1], [3]]


@pytest.mark.parametrize("training", [True, False])
def test_modes_of_modules_are_restored(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
    model[1].train(training)
    run = Trial(model, lambda m, x: m(x).sum(1), (torch.rand(3, 2),), None, "sum", True)
    with run.repeatable() as notes:
        assert notes == ["the model draws random numbers: checked in eval mode"]
        assert not model[0].training
    assert model[0].training
    assert model[1].training is training
