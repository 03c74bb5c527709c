"""The benchmark of searching an index runs on a small one, and prints its rows."""

import json
import sys

import pytest

from benchmarks import index_search


def test_rows_are_stored(tmp_path, monkeypatch: pytest.MonkeyPatch):
    options = "--rows 300 --width 16 --approximate --output".split()
    monkeypatch.setattr(sys, "argv", ["index_search", *options, str(tmp_path / "rows.json")])
    index_search.main()
    exact, near = json.loads((tmp_path / "rows.json").read_text())
    assert exact["rows"] == 300
    assert len(exact["seconds"]) == 3
    assert 0.9 <= near["recall"] <= 1
