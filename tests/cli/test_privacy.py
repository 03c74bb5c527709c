"""`pergrad privacy` answers with numbers of the plan, and refuses half questions in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pergrad.cli import main, privacy
from pergrad.private import Finding, Plan
from tests.private.stepping.cases import plan, run

Command = Callable[..., tuple[int, str, str]]
USUAL = ["--delta", "1e-5", "--sample-rate", "0.004", "--steps", "3750"]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["privacy", *map(str, arguments)])
        printed = capsys.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return code, " ".join(printed.out.split()), printed.err

    return run


def test_it_tells_the_epsilon_of_a_noise(command: Command) -> None:
    code, out, _ = command("--noise", 1.3, *USUAL)
    assert code == 0
    assert "gives epsilon 0.8336 at delta 1e-05, add-remove neighbours, PLD" in out
    assert "3,750 0.8336" in out
    assert "█" in out


def test_help_names_the_extra(command: Command) -> None:
    assert 'Needs the extra "private"' in command("--help")[1]


def test_it_finds_the_noise_for_an_epsilon(command: Command) -> None:
    _, out, _ = command(
        *("--epsilon", 2, "--delta", "1e-5", "--batch-size", 100, "--population", 10_000),
        *("--epochs", 1),
    )
    noise = float(re.search(r"noise multiplier (\S+)", out)[1])
    made = Plan(noise_multiplier=noise, sample_rate=0.01, steps=100, max_norm=1.0)
    assert made.epsilon(1e-5) == pytest.approx(2.0, abs=2e-3)


def test_it_tells_what_a_run_has_spent(command: Command, tmp_path: Path) -> None:
    step, loader = run(plan(), ledger=tmp_path / "ledger.jsonl")
    for batch in loader:
        if step(*batch).step == 4:
            break
    code, out, _ = command("--ledger", tmp_path / "ledger.jsonl", "--delta", 1e-3)
    assert code == 0
    assert f"4 of 6 steps released, epsilon {plan().epsilon(1e-3, steps=4):.4f}" in out
    code, _, err = command("--ledger", tmp_path / "ledger.jsonl")
    assert (code, "pass --delta" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--noise", "1", "--delta", "1e-5", "--steps", "9"], "--batch-size and --population"),
        (
            ["--noise", "1", "--delta", "1e-5", "--sample-rate", "0.1"],
            "one of --steps and --epochs",
        ),
        (["--noise", "1", *USUAL[2:]], "pass --delta"),
        (USUAL, "pass --epsilon to find the noise"),
        (["--noise", "1", "--epsilon", "1", *USUAL], "pass --epsilon to find the noise"),
        (["--noise", "1", *USUAL, "--sampling", "fixed"], "sampling must be one of"),
        (
            ["--noise", "1", *USUAL[:2], "--sample-rate", "2", "--epochs", "1"],
            "must be positive",
        ),
        (["--ledger", "nothing.jsonl"], "No such file"),
        (["--ledger", "nothing.jsonl", "--epsilon", "3"], "leave out --epsilon"),
        (["--ledger", "nothing.jsonl", "--accountant", "rdp"], "leave out --accountant"),
        (["--selftest", "--epsilon", "3", "--delta", "1"], "leave out --epsilon, --delta"),
        (
            ["--noise", "1", *USUAL[:2], "--sample-rate", "0.1", "--epochs", "inf"],
            "must be positive",
        ),
        (
            ["--noise", "1", *USUAL[:2], "--batch-size", "9", "--population", "0", "--steps", "9"],
            "--population must be a positive integer",
        ),
        (
            ["--noise", "1", *USUAL, "--batch-size", "9", "--population", "20"],
            "is not --batch-size / --population = 0.45",
        ),
    ],
)
def test_half_questions_are_refused_in_one_line(
    arguments: list[str], reason: str, command: Command
) -> None:
    code, _, err = command(*arguments)
    assert code in (2, 3)
    assert reason in err
    assert err.count("\n") == 1


def test_a_selftest_that_fails_has_its_exit_code(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("a bug", True, 2.0, 1.0, "epsilon at least")
    missed = Finding("another", True, 0.5, 1.0, "epsilon at least")
    monkeypatch.setattr(privacy, "selftest", lambda seed: [found])
    code, out, _ = command("--selftest")
    assert (code, "a bug epsilon at least 2.000 1 found" in out) == (0, True)
    monkeypatch.setattr(privacy, "selftest", lambda seed: [found, missed])
    code, out, _ = command("--selftest")
    assert (code, "WRONG" in out) == (1, True)


def test_the_plot_rises_to_its_end() -> None:
    drawn = privacy.plot([0, 50, 100], [0.0, 1.0, 2.0]).splitlines()
    assert drawn[0].startswith("   2.000 ┤")
    assert drawn[0].endswith("█")
    assert drawn[-1].split()[-1] == "100"
