"""Options are checked when they are made; they choose parameters and scale gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.engine.recording.modules import survey
from pergrad.engine.recording.options import Options
from pergrad.errors import BatchSizeError, PergradError


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": -1}, BatchSizeError, "must be positive, got -1"),
        ({"batch_size": 2.0}, BatchSizeError, "None or an integer, got float"),
        ({"loss_reduction": "none"}, PergradError, "sum or mean, got none"),
        ({"max_bytes": 0}, PergradError, "max_bytes must be positive, got 0"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_at_once(
    options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        Options(**options)


def test_samples_are_in_the_first_dimension_or_in_the_second() -> None:
    assert Options().batch_dim == 0
    assert Options(batch_first=False).batch_dim == 1


@pytest.mark.parametrize(("loss_reduction", "undone"), [("sum", 1.0), ("mean", 5.0)])
def test_a_mean_is_undone_and_weights_of_samples_are_applied(
    loss_reduction: Any, undone: float
) -> None:
    assert Options(loss_reduction=loss_reduction).scale(5) == undone
    weights = torch.rand(5, requires_grad=True)
    scale = Options(loss_reduction=loss_reduction, sample_weights=weights).scale(5)
    assert isinstance(scale, Tensor)
    assert not scale.requires_grad
    torch.testing.assert_close(scale, weights.detach() * undone)


def test_weights_of_another_number_of_samples_are_refused() -> None:
    with pytest.raises(BatchSizeError, match=r"each of 5 samples, got shape \(4,\)"):
        Options(sample_weights=torch.ones(4)).scale(5)


def model() -> nn.Module:
    """Body and head, whose weights are tied."""
    layers = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    layers["head"].weight = layers["body"].weight
    return layers


def chosen(params: Any, layers: nn.Module) -> list[str]:
    return list(Options(params=params).chosen(layers, survey(layers)[0]))


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (None, ["body.weight", "body.bias", "head.bias"]),
        ("body.*", ["body.weight", "body.bias"]),
        ("*.bias", ["body.bias", "head.bias"]),
        ("head.*", ["body.weight", "head.bias"]),  # by its second name
        (["head.bias", "*.weight"], ["body.weight", "head.bias"]),
    ],
    ids=str,
)
def test_patterns_choose_parameters_by_any_of_their_names(params: Any, names: list[str]) -> None:
    assert chosen(params, model()) == names


def test_parameters_are_chosen_by_themselves() -> None:
    layers = model()
    assert chosen(layers["head"].weight, layers) == ["body.weight"]
    assert chosen([layers["head"].bias, "body.bias"], layers) == ["body.bias", "head.bias"]


@pytest.mark.parametrize(
    ("params", "message"),
    [([], "params is empty"), ("hed.*", "'hed.*'"), (torch.ones(2), "tensor")],
    ids=["nothing", "pattern", "tensor"],
)
def test_what_chooses_nothing_is_refused_with_the_names_there_are(
    params: Any, message: str
) -> None:
    with pytest.raises(PergradError, match=message) as caught:
        chosen(params, model())
    assert "'body.weight', 'body.bias', 'head.bias'" in str(caught.value)


def test_frozen_parameters_cannot_be_chosen() -> None:
    layers = model()
    layers["head"].bias.requires_grad_(False)
    with pytest.raises(PergradError, match="no trainable parameter"):
        chosen("head.bias", layers)
