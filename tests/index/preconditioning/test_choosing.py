"""Each kind has its damping; fits are stored once and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.choosing import (
    Preconditioning,
    loaded_from,
    loaded_preconditioners,
)
from pergrad.index.preconditioning.kronecker import Kronecker
from pergrad.index.preconditioning.second_moment import SecondMoment
from pergrad.index.store.store import Store
from tests.index.cases import built, data, network


def test_defaults_of_the_damping() -> None:
    assert Preconditioning().amount.relative == 1.0
    assert Preconditioning("ekfac").amount.relative == 0.1
    assert Preconditioning("ekfac", damping=0.0, ridge=2.0).amount.of(5.0) == 2.0
    assert Preconditioning(**Preconditioning("ekfac", 0.3).as_json()).damping == 0.3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "kfac"}, "preconditioner must be one of 'none'"),
        ({"labels": "true"}, "labels must be one of 'given'"),
        ({"damping": -1.0}, "damping must be"),
        ({"kind": "ekfac", "unit_norm": True}, "take 'second_moment' or 'none'"),
    ],
)
def test_bad_choices_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(IndexingError, match=message):
        Preconditioning(**given)  # type: ignore[arg-type]


def test_a_fit_is_stored_once_for_each_kind_of_labels(tmp_path: Path) -> None:
    model = network()
    for _ in range(2):
        built(tmp_path, model, preconditioner="ekfac")
    first = (tmp_path / "preconditioner" / "ekfac-given-0.pt").read_bytes()
    built(tmp_path, model, preconditioner="ekfac", labels="sampled")
    built(tmp_path, model, preconditioner="ekfac", damping=5.0)
    found = sorted(path.name for path in (tmp_path / "preconditioner").iterdir())
    assert found == ["ekfac-given-0.pt", "ekfac-sampled-0.pt"]
    assert (tmp_path / "preconditioner" / "ekfac-given-0.pt").read_bytes() == first


def test_what_is_loaded_is_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    model = network()
    built(tmp_path, model, preconditioner="ekfac", checkpoints=[network(seed=1)])
    store = Store(tmp_path)
    models = [network(seed=1), model]
    none = loaded_preconditioners(store, Preconditioning("none"), models)
    assert none is None
    moments = loaded_preconditioners(store, Preconditioning("second_moment"), models)
    assert [type(found) for found in moments or ()] == [SecondMoment] * 2
    factors = loaded_preconditioners(store, Preconditioning("ekfac"), models)
    assert [type(found) for found in factors or ()] == [Kronecker] * 2
    assert loaded_from(tmp_path, Preconditioning("second_moment"), models) is None


def test_a_missing_and_a_damaged_fit_are_named(tmp_path: Path) -> None:
    model = network()
    built(tmp_path, model, preconditioner="ekfac")
    with pytest.raises(IndexingError, match="no gauss_newton preconditioner yet"):
        loaded_from(tmp_path, Preconditioning("gauss_newton"), [model])
    path = tmp_path / "preconditioner" / "ekfac-given-0.pt"
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(IndexingError, match=r"ekfac-given-0\.pt is corrupt"):
        loaded_from(tmp_path, Preconditioning("ekfac"), [model])


def test_optimizers_are_one_or_one_for_each_checkpoint() -> None:
    model, early = network(), network(seed=1)
    made = [torch.optim.Adam(m.parameters()) for m in (early, model, model)]
    with pytest.raises(IndexingError, match="one for each of 2 checkpoints, got 3"):
        built(
            model=model,
            dataset=data(),
            checkpoints=[early],
            preconditioner="adam",
            optimizer=made,
        )
