"""The benchmark of searching an index runs on a small one, and prints its rows."""

import json
from pathlib import Path

from benchmarks import index_search
from benchmarks.rows import RESULTS


def test_rows_are_stored(tmp_path: Path) -> None:
    options = "--rows 300 --width 16 --approximate --output".split()
    index_search.main([*options, str(tmp_path / "rows.json")])
    exact, near = json.loads((tmp_path / "rows.json").read_text())
    assert exact["rows"] == 300
    assert len(exact["seconds"]) == 3
    assert 0.9 <= near["recall"] <= 1
    assert 0.9 <= near["recall_of_other_queries"] <= 1


def test_the_stored_search_of_a_million_rows_meets_its_goals() -> None:
    newest = sorted((RESULTS / "index").glob("search-*.json"))[-1]
    exact, near = json.loads(newest.read_text())
    assert (exact["rows"], exact["width"], exact["threads"]) == (1_000_000, 4096, 2)
    assert max(exact["seconds"]) < 10  # the first one reads the rows from the disk
    assert near["peak_bytes"] < 2 * 2**30
    assert near["recall_of_other_queries"] >= 0.95
