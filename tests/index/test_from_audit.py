"""An audit leaves an index of its sketches: the rows that a build would compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pergrad
from pergrad.errors import AuditError, IndexingError
from tests.index.cases import built, data, losses, network


def test_rows_are_those_of_a_build(tmp_path: Path) -> None:
    model, dataset = network(), data()
    audit = pergrad.Audit.run(
        *(model, dataset, tmp_path, losses), keep_index=32, quiet=True, certify=False, batch_size=8
    )
    expected = built(model=model, dataset=dataset, projection="count", dim=32, dtype="float16")
    assert torch.equal(audit.index.rows(), expected.rows())
    x, y = dataset.tensors
    assert audit.index.scores((x[:2], y[:2])).shape == (2, 40)
    again = pergrad.Audit.run(
        *(model, dataset, tmp_path, losses), keep_index=32, quiet=True, batch_size=8
    )
    assert len(again.index) == 40


@pytest.mark.parametrize("certify", [True, False])
def test_an_index_has_the_certificate_of_its_audit(tmp_path: Path, certify: bool) -> None:
    audit = pergrad.Audit.run(
        *(network(), data(), tmp_path, losses), keep_index=32, quiet=True, certify=certify
    )
    assert audit.index.info().certified is certify


@pytest.mark.parametrize("keep_index", [True, False])
def test_no_index_of_an_earlier_model_is_left_by_force(tmp_path: Path, keep_index: bool) -> None:
    for seed, keep in ((0, True), (1, keep_index)):
        audit = pergrad.Audit.run(
            *(network(seed=seed), data(), tmp_path, losses),
            **{"keep_index": keep, "force": True, "quiet": True, "certify": False},
        )
    if keep_index:
        assert len(audit.index) == 40
    else:
        with pytest.raises(AuditError, match="left no index"):
            _ = audit.index


def test_an_audit_without_an_index_says_how_to_get_one(tmp_path: Path) -> None:
    audit = pergrad.Audit.run(network(), data(), tmp_path, losses, quiet=True, certify=False)
    with pytest.raises(AuditError, match="keep_index=True"):
        _ = audit.index


def test_gradients_of_training_mode_are_refused(tmp_path: Path) -> None:
    from pergrad.audit import AuditOptions, Spec, run_audit  # noqa: PLC0415
    from pergrad.index.from_audit import index_of_audit  # noqa: PLC0415

    spec = Spec(nn.Sequential(network(), nn.Dropout(0.5)).train(), data(), losses)
    options = AuditOptions(certify=False)
    run_audit(spec, tmp_path, options)
    with pytest.raises(IndexingError, match="eval mode"):
        index_of_audit(tmp_path, spec, options, tmp_path / "index")
