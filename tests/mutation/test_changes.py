"""Changes give valid code that differs, leave alone what computes nothing, and are the same for a seed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation.changes import Mutation, choose, mutations_of

SOURCE = '''"""Docstring with 1 < 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from numbers import Number

__all__ = ["f"]
LIMIT: int = 3


def f(x: int | None, /, y: int = 1) -> int:
    """Docstring of f: 1 + 1."""
    if x is None or y > 2 and not y:
        raise ValueError(f"no {x + 1}")
    for a, b in zip([x], [y], strict=True):
        y += a * (b - 1)
    é = [k for k in range(y) if k % 2][1:3]
    assert y == 1
    return cast(int, max(é, default=-2) ** 2)
'''


@pytest.fixture
def mutations(tmp_path: Path) -> list[Mutation]:
    path = tmp_path / "code.py"
    path.write_text(SOURCE)
    return mutations_of(tmp_path, path)


def test_each_change_gives_other_valid_code(mutations: list[Mutation]) -> None:
    sources = [m.source for m in mutations if m.source is not None]
    assert len(sources) > 20
    assert len({ast.dump(ast.parse(source)) for source in sources}) == len(sources)
    assert ast.dump(ast.parse(SOURCE)) not in {ast.dump(ast.parse(source)) for source in sources}


def test_a_change_is_one_line_of_the_file(mutations: list[Mutation]) -> None:
    for m in mutations:
        assert m.source is not None
        pairs = zip(SOURCE.splitlines(), m.source.splitlines(), strict=True)
        assert [k for k, (a, b) in enumerate(pairs, 1) if a != b] == [m.line]
        assert m.before == SOURCE.splitlines()[m.line - 1].strip()
        assert m.after == m.source.splitlines()[m.line - 1].strip()


CHANGES = {
    "LIMIT: int = 3": {"LIMIT: int = 4", "LIMIT: int = 2"},
    "if x is None or y > 2 and not y:": {
        "if x is not None or y > 2 and not y:",
        "if x is None and (y > 2 and (not y)):",
        "if x is None or (y > 2 or not y):",
        "if x is None or y >= 2 and not y:",
        "if x is None or y <= 2 and not y:",
        "if x is None or y > 3 and not y:",
        "if x is None or y > 1 and not y:",
        "if x is None or y > 2 and y:",
        "if not (x is None or (y > 2 and (not y))):",
    },
    'raise ValueError(f"no {x + 1}")': {"pass"},
    "for a, b in zip([x], [y], strict=True):": set(),
    "y += a * (b - 1)": {
        "pass",
        "y -= a * (b - 1)",
        "y += a / (b - 1)",
        "y += a * (b + 1)",
        "y += a * (b - 2)",
        "y += a * (b - 0)",
    },
    "assert y == 1": set(),
    "def f(x: int | None, /, y: int = 1) -> int:": {
        "def f(x: int | None, /, y: int = 2) -> int:",
        "def f(x: int | None, /, y: int = 0) -> int:",
    },
    "return cast(int, max(é, default=-2) ** 2)": {"return None"},
}


@pytest.mark.parametrize("line", CHANGES)
def test_changes_of_a_line_are_these(line: str, mutations: list[Mutation]) -> None:
    assert {m.after for m in mutations if m.before == line} == CHANGES[line]


def test_conditions_and_slices_are_changed(mutations: list[Mutation]) -> None:
    found = {m.after for m in mutations if m.before.startswith("é")}
    assert "é = [k for k in range(y)][1:3]" in found
    assert "é = [k for k in range(y) if k % 2][:3]" in found
    assert "é = [k for k in range(y) if k % 2][1:]" in found


def test_what_computes_nothing_is_left_alone(mutations: list[Mutation]) -> None:
    lines = SOURCE.splitlines()
    changed = {lines[m.line - 1].strip() for m in mutations}
    for untouched in ("import", "__all__", "assert", '"""', "TYPE_CHECKING"):
        assert not any(untouched in line for line in changed)


def test_a_seed_gives_the_same_lines_and_another_gives_others(mutations: list[Mutation]) -> None:
    def chosen(seed: int, count: int = 5) -> list[tuple[str, str, str]]:
        return [m.key for m in choose(mutations, count, seed)]

    assert chosen(3) == chosen(3)
    assert len({*map(str, map(chosen, range(20)))}) > 10
    assert chosen(3, 4) == chosen(3)[:4]
    lines = [m.line for m in choose(mutations, 100, 0)]
    assert len(lines) == len(set(lines)) == len({m.line for m in mutations})
