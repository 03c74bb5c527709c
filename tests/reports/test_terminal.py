import io

import pytest
from rich.console import Console

from pergrad.reports import headline, overview
from tests.reports.edge_cases import CASES, hostile, not_finite
from tests.reports.result_folders import clustered, write_folder

LABELS = [("zero", "one", "two", "three")[n % 4] for n in range(300)]


def printed(folder, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(overview(folder))
    return console.file.getvalue()


def test_the_headline_comes_first_and_then_the_ten_most_suspicious(tmp_path) -> None:
    folder = write_folder(tmp_path, clustered(), labels=LABELS)
    lines = printed(folder).splitlines()
    assert lines[0].strip() == headline(folder)[0]
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == [
        *["rank", "sample", "label", "others", "say", "loss", "norm", "influence", "alignment"]
    ]
    assert [line.split()[0] for line in table[1:]] == [str(rank) for rank in range(1, 11)]


def test_columns_without_content_are_left_out(tmp_path) -> None:
    assert "label" not in printed(write_folder(tmp_path, clustered()))


@pytest.mark.parametrize("case", CASES)
def test_the_overview_fits_into_eighty_columns_and_cuts_no_number(folder_of, case) -> None:
    text = printed(folder_of(case))
    assert max(map(len, text.splitlines())) <= 80
    headings = next(line for line in text.splitlines() if line.split()[:2] == ["rank", "sample"])
    by = "doubt" if case in ("doubts", "hostile_labels") else "influence"
    assert headings.split()[-4:] == ["loss", "norm", by, "alignment"]


def test_labels_can_neither_mark_up_nor_steer_the_terminal(tmp_path) -> None:
    labels = [f"[bold]x\x1b[31m\n{n % 4}" for n in range(300)]
    text = printed(write_folder(tmp_path, clustered(), labels=labels), width=120)
    assert "[bold]x" in text
    assert "\x1b" not in text
    assert "<script>" in printed(hostile(tmp_path / "hostile"))


def test_what_is_not_finite_is_said_in_the_table(tmp_path) -> None:
    assert "not finite" in printed(not_finite(tmp_path), width=120)
