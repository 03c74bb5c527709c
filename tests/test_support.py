"""The support page of the documentation is the one that the tests' own cases and results give."""

from pathlib import Path

import pytest
from torch import nn

import pergrad
from tests.engine import module_cases
from tests.support import END, RESULTS, START, architectures, main, placed, section

PAGE = Path(__file__).parents[1] / "docs" / "support.md"

# The section is written with the torch of constraints.txt; another one has other modules.
pinned_torch = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch is older than that of constraints.txt"
)


@pinned_torch
def test_page_has_the_support_section_of_the_tests() -> None:
    assert main(["--check", str(PAGE)]) == 0


def test_stale_section_is_found_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    assert main(["--check", str(page)]) == 1
    assert "--write" in capsys.readouterr().err
    assert main(["--write", str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")


@pytest.mark.parametrize("text", ["", START, f"{END}{START}", f"{START}{START}{END}"])
def test_page_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="markers"):
        placed(text, "new")


def test_architectures_are_those_of_the_zoo() -> None:
    table = RESULTS.read_text()
    rows = architectures(table)
    assert f"\n{len(rows)} architectures" in table
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.reason for row in rows if row.verdict != "exact")


def test_every_module_and_no_function_of_a_user_is_in_the_section() -> None:
    def some_function_of_a_user() -> None: ...

    @pergrad.implements_per_sample_grads(some_function_of_a_user)
    def rule(grad_output: object) -> dict[str, object]:
        return {}

    try:
        text = section(RESULTS.read_text())
    finally:
        del pergrad.rules.RULES[some_function_of_a_user]
    assert "some_function_of_a_user" not in text
    for cls in module_cases.CASES:
        name = cls.__name__
        stem = name[:-2] if name[-2:] in ("1d", "2d", "3d") else name
        assert f"`{name}`" in text or f"`{stem}1d`–`3d`" in text
