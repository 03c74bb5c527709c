import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.audit import run_audit
from pergrad.audit.subject.checks import (
    notes_of_mode,
    notes_of_randomness,
    refuse_divided_loss,
)
from pergrad.errors import AuditError
from tests.audit.cases import data, losses, mlp, network


def test_dropout_left_on_and_training_mode_are_named() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Sequential(nn.Dropout(0.2)))
    assert notes_of_mode(model)[0].startswith("dropout is on in '1.0' (p=0.2)")
    assert notes_of_mode(model.eval()) == []
    assert "training mode" in notes_of_mode(nn.BatchNorm1d(3))[0]
    assert notes_of_mode(network()) == []
    assert "dropout is on" in notes_of_mode(nn.LSTM(3, 3, 2, dropout=0.5))[0]


def test_parameters_that_are_not_finite_are_named() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = torch.nan
    assert notes_of_mode(model) == [
        "parameter 'bias' has values that are not finite: the training has diverged"
    ]


def test_losses_that_differ_from_run_to_run_are_named() -> None:
    def loss(model, x):
        return F.dropout(model(x), 0.5).sum(1)

    x, model = torch.ones(4, 3), nn.Linear(3, 3)
    before = torch.get_rng_state()
    assert "F.dropout needs training" in notes_of_randomness(loss, model, (x,), 0)[0]
    assert torch.equal(before, torch.get_rng_state())
    for same in (lambda model, x: model(x).sum(1), lambda model, x: 1 / 0):
        assert notes_of_randomness(same, model, (x,), 0) == []


def test_a_note_of_dropout_is_in_the_summary(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2))
    assert any("dropout is on" in note for note in run_audit(mlp(model=model), tmp_path)["notes"])


def test_a_loss_divided_by_the_batch_is_refused_before_the_audit(tmp_path) -> None:
    spec = mlp(loss=lambda model, x, y: losses(model, x, y) / len(x))
    with pytest.raises(AuditError, match=r"divided by the size of the batch.*batch of 8 is 4/8"):
        run_audit(spec, tmp_path)


@pytest.mark.parametrize(
    "loss",
    [
        losses,
        lambda model, x, y: losses(model, x, y) * 0,
        lambda model, x, y: losses(model, x, y) * float("nan"),
        lambda model, x, y: losses(model, x, y).sum(),
        lambda model, x, y: 1 / 0,
    ],
)
def test_other_losses_are_left_to_the_audit(loss) -> None:
    refuse_divided_loss(loss, network(), tuple(data(8).tensors), 8)
    refuse_divided_loss(loss, network(), tuple(data(1).tensors), 1)
    refuse_divided_loss(loss, network(), (torch.zeros(3), "text"), 8)
