"""Queries become arguments of the loss, and rows: plain and preconditioned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pergrad.audit import Spec
from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import OnGradients, OnRows
from pergrad.index.querying.queries import as_batch, prepared, query_rows, size_of
from pergrad.index.rows.computing import RowMaker
from pergrad.index.subject import Subject, made_subject
from pergrad.testing import assert_near
from tests.index.cases import data, flat_gradients, losses, network

X, Y = data(6).tensors


def maker_of(model: nn.Module) -> RowMaker:
    return RowMaker([model], losses, "none", 1, 0)


def test_the_size_is_that_of_the_first_tensor() -> None:
    assert size_of((3, torch.zeros(5, 2))) == 5
    assert size_of(({"n": torch.tensor(1), "x": torch.zeros(4)},)) == 4
    with pytest.raises(IndexingError, match="holds no tensor"):
        size_of((1, "text"))
    assert as_batch(X)[0] is X


class Thrice(OnRows):
    def applied(self, rows: Tensor) -> Tensor:
        return 3 * rows


class Halves(OnGradients):
    def applied(self, gradients: Any) -> dict[str, Tensor]:
        return {name: g / 2 for name, g in gradients.items()}


def test_rows_are_preconditioned_as_rows_or_as_gradients() -> None:
    model = network()
    exact = flat_gradients(model, X, Y)
    for how, factor in ((None, 1.0), ([Thrice()], 3.0), ([Halves()], 0.5)):
        found, plain = query_rows(maker_of(model), (X, Y), how)
        assert_near(plain[:, 0], exact)
        assert_near(found[:, 0], factor * exact)


def test_inputs_alone_get_the_class_that_is_predicted() -> None:
    model = network()
    subject = made_subject(model, data(6), losses)
    x, y = prepared((X,), subject, maker_of(model))
    assert x is X
    assert torch.equal(y, model(X).argmax(1))
    assert prepared((X, Y), subject, maker_of(model))[1] is Y


def test_targets_that_are_no_classes_cannot_be_predicted() -> None:
    model = network()
    pairs = [(x, torch.randn(3)) for x in X]
    subject = Subject(Spec(model, pairs, losses))
    with pytest.raises(IndexingError, match="are not classes"):
        prepared((X,), subject, maker_of(model))


def test_texts_are_tokenized_or_refused() -> None:
    model = network()
    bare = Subject(Spec(model, data(6), losses))
    with pytest.raises(IndexingError, match="needs tokenizer="):
        prepared("a text", bare, maker_of(model))
    seen: list[Any] = []

    def tokenizer(texts: list[str], **options: Any) -> dict[str, Tensor]:
        seen.append((texts, options))
        return {"input_ids": torch.zeros(len(texts), 2)}

    own = Subject(Spec(model, data(6), losses), tokenizer=tokenizer)
    (batch,) = prepared(["a", "b"], own, maker_of(model))
    assert batch["input_ids"].shape == (2, 2)
    assert seen == [(["a", "b"], {"return_tensors": "pt", "padding": True})]


def test_a_query_of_another_shape_is_explained() -> None:
    model = network()
    with pytest.raises(IndexingError, match="does not fit the model and loss of this index"):
        query_rows(maker_of(model), (X[:, :2], Y), None)
