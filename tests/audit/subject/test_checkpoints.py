import pytest
import torch
from torch import nn

from pergrad.audit.subject.checkpoints import loaded_checkpoints
from pergrad.errors import AuditError
from tests.audit.cases import losses, mlp, network


def loaded(*checkpoints):
    spec = mlp(loss=losses, logits=lambda model, x, y: model(x), checkpoints=checkpoints)
    return loaded_checkpoints(spec, torch.device("cpu"), None)


def test_state_dicts_files_and_modules_are_the_same_checkpoint(tmp_path) -> None:
    earlier = network(seed=1)
    torch.save(earlier.state_dict(), tmp_path / "a.pt")
    found = loaded(earlier.state_dict(), tmp_path / "a.pt", str(tmp_path / "a.pt"), earlier)
    for model in found:
        for one, other in zip(model.parameters(), earlier.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("missing.pt", "cannot load checkpoint missing.pt"),
        (3, "checkpoint 0 must be a state dict"),
        ({"weight": torch.zeros(1)}, "checkpoint 0 does not fit the model"),
        (
            {"state_dict": network().state_dict(), "epoch": 3},
            r"holds more than a state dict .state_dict, epoch.: pass torch.load\(...\)\['state_dict'\]",
        ),
        (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)),
            r"parameter '2.weight' has the shape \(4, 8\), that of the model is \(3, 8\)",
        ),
        (nn.Sequential(nn.Linear(6, 8)), "parameter '2.weight' is missing"),
    ],
)
def test_what_is_no_checkpoint_is_refused(checkpoint, message) -> None:
    with pytest.raises(AuditError, match=message) as raised:
        loaded(checkpoint)
    assert "\n" not in str(raised.value)
