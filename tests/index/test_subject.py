"""A subject has its models placed once, in eval mode, with equal parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pergrad.audit import Spec
from pergrad.errors import IndexingError
from pergrad.index.options import IndexOptions
from pergrad.index.subject import identity_of, in_eval_mode, made_subject
from tests.index.cases import data, losses, network


def test_checkpoints_that_repeat_count_once_and_the_model_is_last() -> None:
    model, early = network(), network(seed=1)
    states = [early.state_dict(), early, model.state_dict()]
    placed = made_subject(model, data(), losses, checkpoints=states).placed(IndexOptions())
    assert len(placed.models) == len({*placed.fingerprints}) == 2
    assert placed.models[-1] is model
    assert torch.equal(placed.models[0][0].weight, early[0].weight)
    assert placed.dtype == "float64"


def test_a_checkpoint_with_other_trained_parameters_is_refused() -> None:
    other = network(seed=1)
    other[0].weight.requires_grad_(False)
    subject = made_subject(network(), data(), losses, checkpoints=[other])
    with pytest.raises(IndexingError, match="checkpoint 0 has other trained parameters"):
        subject.placed(IndexOptions())


def test_a_model_in_another_dtype_is_a_copy() -> None:
    model = network()
    placed = made_subject(model, data(), losses).placed(IndexOptions(compute_dtype="float32"))
    assert placed.dtype == "float32"
    assert model[0].weight.dtype == torch.float64


def test_modes_come_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    model[1].eval()
    with in_eval_mode([model]):
        assert not any(module.training for module in model.modules())
    with pytest.raises(ZeroDivisionError), in_eval_mode([model]):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_spec_comes_alone_and_a_model_with_data() -> None:
    spec = Spec(network(), data(), losses)
    assert made_subject(spec).spec is spec
    with pytest.raises(IndexingError, match="pass the spec alone"):
        made_subject(spec, data())
    with pytest.raises(IndexingError, match="needs a data set"):
        made_subject(network())


def test_tokens_are_the_attention_mask_or_all() -> None:
    tokens = made_subject(network(), data(), losses).tokens
    assert tokens is not None
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(tokens({"input_ids": ids, "attention_mask": mask}), mask)
    assert tokens({"input_ids": ids}).tolist() == tokens(ids).tolist() == [[True] * 3] * 2
    with pytest.raises(IndexingError, match="needs batches of tokens"):
        tokens(torch.zeros(2))


def test_identity_has_whatever_rows_depend_on() -> None:
    subject = made_subject(network(), data(), losses)

    def of(**options: object) -> dict[str, object]:
        chosen = IndexOptions(**options)  # type: ignore[arg-type]
        return identity_of(subject, subject.placed(chosen), chosen)

    for changed in ({"dim": 8}, {"seed": 1}, {"dtype": "float32"}, {"projection": "normal"}):
        assert of(**changed) != of()
    for same in ({"batch_size": 3}, {"chunk": 5}, {"workers": 1}, {"certify": False}):
        assert of(**same) == of()
