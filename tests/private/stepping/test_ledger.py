"""The ledger has a line for each release, survives a cut line, and refuses what does not belong to it."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest

from pergrad.errors import PrivacyError
from pergrad.private.stepping.ledger import Ledger, read_ledger

HEAD = {"plan": {"steps": 3}, "run": "a"}


def written(path: Path, *seals: str) -> Ledger:
    ledger = Ledger(path)
    ledger.begin(HEAD)
    for number, seal in enumerate(seals):
        ledger.write(number, seal)
    return ledger


def test_a_person_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, "x", "y")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["plan"] == {"steps": 3}
    assert lines[1:] == [{"step": 1, "seal": "x"}, {"step": 2, "seal": "y"}]
    assert read_ledger(path)[1] == 2


def test_repeating_a_step_adds_no_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, "x", "y")
    before = path.read_text()
    written(path, "x", "y")
    assert path.read_text() == before


def test_another_sum_under_the_same_noise_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "ledger.jsonl", "x", "y")
    with pytest.raises(PrivacyError, match="step 1 was released before from another sum"):
        written(tmp_path / "ledger.jsonl", "x", "z")


def test_a_line_that_a_crash_cut_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, "x")
    with path.open("ab") as file:
        file.write(b'{"step": 2, "se')
    assert read_ledger(path)[1] == 1
    ledger = written(path, "x", "y")
    assert ledger.seals == ["x", "y"]
    assert [*map(json.loads, path.read_text().splitlines())][-1]["seal"] == "y"


def test_a_cut_first_line_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"ledg')
    assert written(path, "x").seals == ["x"]
    assert read_ledger(path)[1] == 1


def test_the_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, "x")
    with pytest.raises(PrivacyError, match="of another run: it differs in run"):
        Ledger(path).begin(HEAD | {"run": "b"})


def test_missing_lines_are_refused(tmp_path: Path) -> None:
    ledger = written(tmp_path / "ledger.jsonl", "x")
    with pytest.raises(PrivacyError, match="ends at step 1, but the run is at step 5"):
        ledger.write(5, "z")


@pytest.mark.parametrize("text", ["[]\n", "hello\n", '{"ledger": 9}\n'])
def test_a_file_that_is_no_ledger_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with pytest.raises(PrivacyError, match="is not a ledger: line 1"):
        Ledger(path)


def test_an_empty_ledger_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("")
    with pytest.raises(PrivacyError, match="is empty"):
        read_ledger(path)


def test_a_ledger_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = written(path, "x"), Ledger(path)
    first.write(1, "y")
    second.begin(HEAD)
    with pytest.raises(PrivacyError, match="another run has written to the ledger"):
        second.write(1, "z")
    assert read_ledger(path)[1] == 2


def test_a_full_disk_leaves_the_ledger_whole_and_the_step_can_be_made_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = written(path, "x")
    before = path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(PrivacyError, match=r"cannot be written .* so the step is not made"):
            ledger.write(1, "y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    ledger.write(1, "y")
    assert read_ledger(path)[1] == 2


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "ledger.jsonl"):
        with pytest.raises(PrivacyError, match="cannot be a file there: make its folder"):
            Ledger(path)
