"""States of checkpoints are read as they were written, by fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pergrad.errors import IndexingError
from pergrad.index.store.states import read_state, write_states
from tests.index.cases import network


def test_states_are_those_of_each_model(tmp_path: Path) -> None:
    models = [network(), network(seed=1)]
    write_states(tmp_path, models, ["first", "second"])
    for model, fingerprint in zip(models, ("first", "second"), strict=True):
        found = read_state(tmp_path, fingerprint)
        assert found is not None
        assert list(found) == list(model.state_dict())
        assert all(torch.equal(found[name], t) for name, t in model.state_dict().items())
    assert read_state(tmp_path, "third") is None


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    write_states(tmp_path, [network()], ["first"])
    path = tmp_path / "states" / "first.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(IndexingError, match=r"first\.pt is corrupt"):
        read_state(tmp_path, "first")


def test_a_state_has_the_same_bytes_whenever_it_is_written(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_states(tmp_path / name, [network()], ["x"])
        found.append((tmp_path / name / "states" / "x.pt").read_bytes())
    assert found[0] == found[1]
