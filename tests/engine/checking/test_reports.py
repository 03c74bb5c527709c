"""Columns of a table line up, whatever is in them."""

import pytest

from pergrad.engine.checking.reports import text_table

HEADER = ["name", "size", "what it is"]
ROWS = [["a", "100000", ""], ["a long name", "2", "x"], ["", "", "y"]]


def test_every_column_begins_at_one_place_in_all_lines() -> None:
    lines = text_table(HEADER, ROWS).split("\n")
    starts = [lines[0].index(cell) for cell in HEADER]
    assert starts == [0, len("a long name") + 2, len("a long name") + 2 + len("100000") + 2]
    for line, row in zip(lines, [HEADER, *ROWS], strict=True):
        for start, cell in zip(starts, row, strict=True):
            assert line[start:].startswith(cell)


def test_no_line_ends_with_spaces() -> None:
    assert all(line == line.rstrip() for line in text_table(HEADER, ROWS).split("\n"))


def test_a_table_may_be_without_rows() -> None:
    assert text_table(HEADER, []) == "name  size  what it is"


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        text_table(HEADER, [["a"]])
