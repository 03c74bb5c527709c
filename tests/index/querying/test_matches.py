"""Matches as a table, a frame and a page: what comes from the data is escaped."""

from __future__ import annotations

from pathlib import Path

import pergrad
from tests.index.cases import data, spec


def test_the_page_escapes_what_comes_from_the_data(tmp_path: Path) -> None:
    index = pergrad.Index.build(spec(), quiet=True, certify=False)
    found = index.query(tuple(t[:2] for t in data().tensors), 3)
    page = found.html(tmp_path / "page.html").read_text()
    assert page.count("&lt;b&gt;") == 2 * 2 * 3
    assert "<b>" not in page
    assert "Helpful" in page
    frame = found.frame
    assert {"query", "kind", "rank", "index", "score", "label", "loss"} == set(frame.columns)
    assert "helpful" in str(found)
    assert "iframe" in found._repr_html_()
