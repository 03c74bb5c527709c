"""The command `pergrad index`: build, query, info, append, delete; errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pergrad.cli import main

CASES = "tests.index.cases"


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run the command in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def test_an_index_is_built_queried_changed_and_described(command, tmp_path: Path):
    code, out, _ = command(
        "index", "build", f"{CASES}:spec", "-o", "a", "--dim", 64, "--no-certify"
    )
    assert code == 0
    assert "bytes per sample" in out
    code, out, _ = command(
        *("index", "query", "a", "--item", 0, "--item", 3, "-k", 2),
        *("--html", "page.html", "--csv", "table.csv"),
    )
    assert code == 0
    assert "helpful" in out
    assert "harmful" in out
    assert (tmp_path / "page.html").exists()
    assert (tmp_path / "table.csv").read_text().count("\n") == 1 + 2 * 2 * 2
    code, out, _ = command("index", "append", "a", f"{CASES}:more")
    assert (code, "48" in out) == (0, True)
    code, _, err = command("index", "abandon", "a")
    assert (code, "no append that was interrupted" in err) == (2, True)
    for item in (40, -1):
        code, out, err = command("index", "query", "a", "--item", item)
        assert (code, out, "40 items" in err) == (2, "", True)
    code, out, _ = command("index", "delete", "a", 0, 41, "--compact")
    assert (code, out) == (0, "2 rows deleted, 46 left\n")
    code, out, _ = command("index", "info", "a")
    assert (code, "46" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "missing"), "holds no index"),
        (("query", "missing", "--item", 0), "holds no index"),
        (
            ("build", f"{CASES}:spec", "--projection", "fourier"),
            "--projection must be one of count",
        ),
        (("build", f"{CASES}:nothing"), "has no attribute 'nothing'"),
    ],
)
def test_bad_input_is_one_line(command, arguments, message):
    code, out, err = command("index", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_an_audit_leaves_an_index_that_can_be_queried(command):
    code, _, _ = command("audit", f"{CASES}:spec", "-o", "a", "--keep-index", "--no-certify")
    assert code == 0
    code, out, _ = command("index", "query", "a/index", "--item", 0)
    assert code == 0
    assert "helpful" in out
