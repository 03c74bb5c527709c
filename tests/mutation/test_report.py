"""The report names survivors with their reasons; a reason that fits nothing is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutation.changes import Mutation, mutations_of
from mutation.report import StaleError, load_accepted, report
from mutation.trials import Outcome


@pytest.fixture
def mutations(tmp_path: Path) -> list[Mutation]:
    path = tmp_path / "src" / "pergrad" / "rules" / "code.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f(x):\n    return x < 2\n")
    return mutations_of(tmp_path, path)


def accept(folder: Path, *, line: str, change: str, reason: str = "as fast") -> Path:
    path = folder / "accepted.toml"
    path.write_text(
        f'[[survivor]]\nfile = "src/pergrad/rules/code.py"\nline = "{line}"\n'
        f'change = "{change}"\nreason = "{reason}"\n'
    )
    return path


def test_survivors_are_listed_with_their_change_and_reason(
    tmp_path: Path, mutations: list[Mutation]
) -> None:
    path = accept(tmp_path, line="return x < 2", change="return x <= 2")
    accepted = load_accepted(path, mutations)
    by_change = {m.after: m for m in mutations}
    results = [
        (by_change["return x <= 2"], Outcome("survived", tests=7)),
        (by_change["return x < 3"], Outcome("not run")),
        (by_change["return None"], Outcome("failed", ("tests/test_a.py::test_b",), 1)),
        (by_change["return x >= 2"], Outcome("crashed or hung", ("tests/test_a.py::test_b",), 1)),
    ]
    text = report(results, accepted, seed=3, goal=0.9)
    assert "2 of 4 changed lines" in text
    assert "50.0%" in text
    assert "seed 3" in text
    assert "| rules | 4 | 2 |" in text
    assert "7 tests ran. Accepted: as fast" in text
    assert "no test runs this line. **No reason on record.**" in text
    assert "-return x < 2\n+return x <= 2\n" in text
    assert "-return x < 2\n+return x < 3\n" in text
    assert "return None" not in text


@pytest.mark.parametrize(
    ("line", "change"), [("return x < 1", "return x <= 1"), ("return x < 2", "return x == 2")]
)
def test_an_entry_that_fits_no_line_is_an_error(
    line: str, change: str, tmp_path: Path, mutations: list[Mutation]
) -> None:
    with pytest.raises(StaleError, match="take the entry out"):
        load_accepted(accept(tmp_path, line=line, change=change), mutations)


def test_an_entry_without_a_reason_is_an_error(tmp_path: Path, mutations: list[Mutation]) -> None:
    path = accept(tmp_path, line="return x < 2", change="return x <= 2", reason=" ")
    with pytest.raises(StaleError, match="needs a reason"):
        load_accepted(path, mutations)


def test_an_entry_that_a_test_notices_is_named(tmp_path: Path, mutations: list[Mutation]) -> None:
    path = accept(tmp_path, line="return x < 2", change="return x <= 2")
    noticed = next(m for m in mutations if m.after == "return x <= 2")
    text = report(
        [(noticed, Outcome("failed", ("t",), 1))], load_accepted(path, mutations), seed=0, goal=0.9
    )
    assert "Accepted, but noticed" in text
