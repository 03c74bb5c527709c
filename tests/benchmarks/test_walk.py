import json
from pathlib import Path

import pytest

from benchmarks import walk


def test_every_counted_call_is_pergrads_own() -> None:
    seen = walk.walk()
    assert all(call.partition(":")[0].endswith(".py") for call in seen)
    assert "runtime/eagerness.py:call" in seen[:2]  # after the quantity was made
    assert "rules/linear.py:linear" in seen


def test_a_change_of_file_is_a_call_in_another_file_than_the_last() -> None:
    assert walk.changes_of_file(["a:f", "a:g", "b:f", "a:f"]) == 3


def test_one_warm_call_stays_short() -> None:
    seen = walk.walk()
    assert len(seen) <= 200
    assert walk.changes_of_file(seen) <= 100


def test_the_figure_is_stored_with_its_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "RESULTS", tmp_path)
    walk.main(["--store"])
    (path,) = (tmp_path / "walk").glob("*.json")
    stored = json.loads(path.read_text())
    assert stored["calls"] == len(walk.walk())
    assert "torch" in stored["provenance"]["versions"]
