"""Samples that a model mixes are found by changing one and looking at the gradients of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BatchEncoding

import pergrad
from pergrad.engine.checking.mixing import mixing
from pergrad.engine.checking.trial import Trial
from tests.engine.exactness import Formula, numbers, state_of

SIZE, T, D, OUT, WORDS = 5, 6, 4, 3, 7


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(3).flatten(1).sum(1)


def words() -> Tensor:
    return torch.randint(WORDS, (SIZE, T))


def centred(model: nn.Module, x: Tensor) -> Tensor:
    """Samples mixed out of sight of autograd."""
    h = model.part(x)
    return h - h.detach().mean(0)


def found(model: nn.Module, *batch: Any) -> tuple[list[str], list[str]]:
    """The problems and the notes."""
    run = Trial(model, loss, batch, None, "sum", True)
    notes: list[str] = []
    return mixing(run, run.per_sample(run.batch).result, SIZE, notes), notes


@pytest.mark.parametrize("kind", ["numbers", "words"])
def test_samples_mixed_out_of_sight_of_autograd_are_found(kind: str) -> None:
    part = nn.Linear(D, OUT) if kind == "numbers" else nn.Embedding(WORDS, OUT)
    batch = numbers(SIZE, D) if kind == "numbers" else words()
    report = pergrad.verify(Formula(centred, part=part).double(), loss, batch, quiet=True)
    assert not report.ok
    assert any("mixes samples" in problem for problem in report.problems)


@pytest.mark.parametrize("mixes", [False, True])
def test_mixing_is_looked_for_in_a_batch_of_integers_without_an_embedding_layer(
    mixes: bool,
) -> None:
    def looked_up(m: Any, ids: Tensor) -> Tensor:
        x = F.embedding(ids, m.table)
        with torch.no_grad():
            other = x.detach().numpy()[::-1].copy() if mixes else x.detach().numpy()
        return (x * torch.from_numpy(other) * m.scale).sum((1, 2))

    model = Formula(looked_up, table=numbers(9, 3), scale=numbers(3))
    report = pergrad.verify(
        model, lambda m, ids: m(ids), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]), quiet=True
    )
    assert any("mixes samples" in problem for problem in report.problems) == mixes
    assert report.ok != mixes


def test_mixing_that_cannot_be_tried_is_noted() -> None:
    model = Formula(lambda m, ids: F.embedding(ids, m.table).sum((1, 2)), table=numbers(9, 3))
    same = torch.tensor([[1, 2], [1, 2], [1, 2]])
    report = pergrad.verify(model, lambda m, ids: m(ids), same, quiet=True)
    assert report.ok
    assert any("whether samples mix was not tried" in note for note in report.notes)


class Shifted(nn.Module):
    """Each sample gets something of its neighbour's, of which autograd knows nothing."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = self.part(x)
        return h * torch.from_numpy(h.detach().numpy().copy()).roll(1, 0)


def test_the_samples_that_another_one_reaches_are_named() -> None:
    problems, notes = found(Shifted(nn.Linear(D, OUT).double()), numbers(SIZE, D))
    assert notes == []
    (problem,) = problems
    assert "spoils the gradients of [1]" in problem


def test_tokens_are_spoilt_where_an_embedding_looks_them_up() -> None:
    model = Shifted(nn.Embedding(WORDS, OUT).double())
    (problem,), _ = found(model, words())
    assert "making sample 0 NaN" in problem


def test_tokens_of_a_tokenizer_are_spoilt_like_others() -> None:
    model = Formula(lambda m, given: m.part(given["ids"]), part=Shifted(nn.Embedding(WORDS, OUT)))
    (problem,), _ = found(model.double(), BatchEncoding({"ids": words()}))
    assert "making sample 0 NaN" in problem


def test_a_model_that_keeps_samples_apart_has_no_problem_and_no_hooks_left() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, D), nn.Linear(D, OUT)).double()
    before = state_of(model)
    assert found(model, words()) == ([], [])
    assert state_of(model) == before
    assert not any(m._forward_hooks for m in model.modules())


def test_a_single_sample_has_none_to_mix_with() -> None:
    run = Trial(nn.Linear(D, OUT).double(), loss, (numbers(1, D),), None, "sum", True)
    assert mixing(run, run.per_sample(run.batch).result, 1, []) == []


def test_a_model_that_refuses_nan_is_noted() -> None:
    def checked(m: Any, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return m.part(x)

    problems, notes = found(Formula(checked, part=nn.Linear(D, OUT)).double(), numbers(SIZE, D))
    assert problems == []
    assert notes == ["whether samples mix was not tried: the model fails where one is NaN"]
