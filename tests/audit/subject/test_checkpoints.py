import pytest
import torch

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
    ],
)
def test_what_is_no_checkpoint_is_refused(checkpoint, message) -> None:
    with pytest.raises(AuditError, match=message):
        loaded(checkpoint)
