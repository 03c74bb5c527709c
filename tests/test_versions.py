"""The versions that the documentation names are those that runs of the tests have stored."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.versions import END, START, Run, main, stored

ROOT = Path(__file__).parents[1]


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_page_has_the_versions_that_are_stored() -> None:
    assert main(["--check", str(ROOT / "docs" / "support.md")]) == 0


def test_floor_has_the_oldest_torch_and_triton_and_all_else_as_developed_with() -> None:
    pinned, floor = _pins("constraints.txt"), _pins("constraints-floor.txt")
    assert {name for name in pinned if floor.get(name) != pinned[name]} == {"torch", "triton"}
    assert pinned.keys() == floor.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = " ".join([*project["dependencies"], *project["optional-dependencies"]["dev"]])
    for name in ("torch", "triton"):
        (oldest,) = re.findall(rf"\b{name}>=([\d.]+)", asked)
        assert floor[name].startswith(f"{oldest}.")


def _pytest_with(code: pytest.ExitCode, **counts: int) -> Any:
    def run(arguments: Sequence[str], plugins: Sequence[Any]) -> pytest.ExitCode:
        stats = {kind: [None] * count for kind, count in counts.items()}
        for plugin in plugins:
            plugin.pytest_terminal_summary(SimpleNamespace(stats=stats))
        return code

    return run


def test_run_that_passes_is_stored_and_written_into_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytest, "main", _pytest_with(pytest.ExitCode.OK, passed=1234, skipped=5))
    folder, page = tmp_path / "tested", tmp_path / "page.md"
    assert main(["--run"], folder) == 0
    (run,) = stored(folder)
    assert (run.passed, run.skipped) == (1234, 5)
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    assert main(["--check", str(page)], folder) == 1
    assert "--write" in capsys.readouterr().err
    assert main(["--write", str(page)], folder) == 0
    assert main(["--check", str(page)], folder) == 0
    assert "| 1,234 | 5 |" in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("\nafter\n")


def test_run_with_a_failure_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = pytest.ExitCode.TESTS_FAILED
    monkeypatch.setattr(pytest, "main", _pytest_with(code, passed=9, failed=1))
    assert main(["--run"], tmp_path) == 1
    assert stored(tmp_path) == []


def test_later_run_replaces_the_earlier_one_of_its_minor_version(tmp_path: Path) -> None:
    runs = [
        Run("2.13.0", "3.7.1", "3.11.7", "CPU", 1, 1),
        Run("2.9.1", "3.5.1", "3.11.7", "CPU", 2, 1),
        Run("2.9.0", "3.5.0", "3.11.7", "CPU", 3, 1),
    ]
    for run in runs:
        (tmp_path / run.file_name).write_text(json.dumps(vars(run)))
    assert [run.passed for run in stored(tmp_path)] == [3, 1]
