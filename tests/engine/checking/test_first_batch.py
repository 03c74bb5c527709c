"""The first batch of a pass: facts if it is proved, the reason if it is not, the given error if wrong."""

from typing import Any

import pytest
from torch import Tensor, nn

from pergrad.engine.checking.first_batch import certified_first
from pergrad.errors import AuditError, IndexingError, PergradError
from pergrad.quantities import Norms
from tests.engine.exactness import numbers
from tests.engine.wrong_rule import Scaled, planted

SIZE, D, OUT = 4, 4, 2


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def certified(
    model: nn.Module, losses: Any = loss, error: type[PergradError] = AuditError, **changes: Any
) -> dict[str, Any]:
    batch = (numbers(SIZE, D),)
    options = {"max_bytes": 2**20, "purpose": "look", **changes}
    return certified_first(model, losses, batch, SIZE, error=error, **options)


def test_a_proved_batch_gives_the_facts() -> None:
    norms = Norms()
    found = certified(nn.Linear(D, OUT).double(), quantities=[norms])
    assert found["ok"]
    assert (found["samples"], found["parameters"]) == (SIZE, 2)
    assert found["largest_error"] < 1e-9
    assert found["proved_in"] == "float64"
    assert norms.result.shape == (SIZE,)


def test_a_refused_model_is_proved_sample_by_sample_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, OUT)).double()
    model[1].register_full_backward_hook(lambda module, of_input, of_output: of_input)
    assert certified(model)["ok"]


def test_an_error_of_the_model_is_the_reason() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("no such column")

    assert certified(nn.Linear(D, OUT).double(), broken) == {
        "ok": False,
        "reason": "no such column",
    }


@pytest.mark.parametrize("error", [AuditError, IndexingError])
def test_wrong_gradients_raise_the_given_error(error: type[PergradError]) -> None:
    wrong = r"first 4 samples are wrong .*--no-certify, to look"
    with planted(0.1, sample=2), pytest.raises(error, match=wrong):
        certified(Scaled(), error=error)
