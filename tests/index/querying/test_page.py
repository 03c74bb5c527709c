"""The page holds every match, escapes what comes from the data, and fetches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pergrad.errors import IndexingError
from pergrad.index.querying.page import Card, Section, write_page, written_page
from pergrad.reports.pictures import Shown

CARD = Card(41, "+1.25", Shown(excerpt="<script>alert(1)</script>"), (("label", "<i>cat</i>"),))


def test_matches_are_written_and_escaped() -> None:
    page = written_page("a & b", [Section(0, Shown(), (CARD,), ())])
    assert "sample 41" in page
    assert "+1.25" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;i&gt;cat" in page
    assert "a &amp; b" in page
    assert page.count("<p>none</p>") == 1  # nothing harms


def test_the_recall_is_told_if_the_search_was_approximate() -> None:
    assert "recall" not in written_page("t", [])
    assert "recall 0.953." in written_page("t", [], 0.9531)


def test_nothing_is_fetched() -> None:
    page = written_page("t", [Section(0, Shown(), (CARD,), (CARD,))])
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert write_page(tmp_path / "new" / "page.html", "ü").read_text(encoding="utf-8") == "ü"
    with pytest.raises(IndexingError, match=r"cannot write the page .*new"):
        write_page(tmp_path / "new", "text")
