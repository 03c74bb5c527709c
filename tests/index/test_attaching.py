"""An index is tied to its model by fingerprints, and remembers builds of this process weakly."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pergrad import Index
from pergrad.errors import IndexingError
from pergrad.index import attaching
from pergrad.index.attaching import (
    attached,
    options_of,
    referred,
    remember,
    remembered,
    with_stored_states,
)
from pergrad.index.store.store import Store
from pergrad.index.subject import made_subject
from tests.index.cases import built, data, losses, network


def test_options_are_read_back(tmp_path: Path) -> None:
    built(tmp_path, projection="two_sided", dim=4, seed=7, dtype="float32", batch_size=5)
    found = options_of(Store(tmp_path).manifest)
    assert (found.projection, found.dim, found.seed) == ("two_sided", 4, 7)
    assert (found.dtype, found.per, found.batch_size) == ("float32", "sample", 5)
    assert (found.compute_dtype, found.device) == ("float64", "cpu")


def test_checkpoints_come_from_the_index(tmp_path: Path) -> None:
    model, early = network(), network(seed=1)
    built(tmp_path, model, checkpoints=[early])
    store = Store(tmp_path)
    subject = with_stored_states(store, made_subject(model, data(), losses))
    assert len(subject.checkpoints) == 1
    placed = attached(store, subject).placed
    assert placed.fingerprints == store.manifest.identity["models"]
    assert torch.equal(placed.models[0][0].weight, early[0].weight)


def test_checkpoints_that_are_nowhere_are_asked_for(tmp_path: Path) -> None:
    model = network()
    built(tmp_path, model, checkpoints=[network(seed=1)], keep_states=False)
    with pytest.raises(IndexingError, match="pass them as checkpoints="):
        with_stored_states(Store(tmp_path), made_subject(model, data(), losses))


def test_other_checkpoints_are_named(tmp_path: Path) -> None:
    model = network()
    built(tmp_path, model, checkpoints=[network(seed=1)])
    other = made_subject(model, data(), losses, checkpoints=[network(seed=2)])
    with pytest.raises(IndexingError, match="another checkpoints"):
        attached(Store(tmp_path), other)


def test_a_model_is_remembered_as_long_as_it_lives(tmp_path: Path) -> None:
    model = network()
    remember(tmp_path, made_subject(model, data(), losses))
    found = remembered(tmp_path)
    assert found is not None
    assert found.spec.model is model
    del model, found
    gc.collect()
    assert remembered(tmp_path) is None
    assert remembered(tmp_path / "other") is None


def test_few_builds_are_remembered(tmp_path: Path) -> None:
    models = [network(seed=n) for n in range(10)]
    for number, model in enumerate(models):
        remember(tmp_path / str(number), made_subject(model, data(), losses))
    alive = [remembered(tmp_path / str(number)) is not None for number in range(10)]
    assert alive == [False] * 2 + [True] * 8
    assert len(attaching._REMEMBERED) == 8


def test_a_reference_is_followed(tmp_path: Path) -> None:
    spec = "tests.index.cases:spec"
    index = built(tmp_path, reference=(spec, None))
    found = referred(Store(tmp_path).manifest)
    assert found is not None
    assert torch.equal(found.spec.model[0].weight, network()[0].weight)
    assert referred(built()._store.manifest) is None
    del index
    assert isinstance(Index(tmp_path), Index)
