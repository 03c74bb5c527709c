"""Audits are counted and stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.private import audits
from benchmarks.rows import RESULTS
from pergrad.private import Finding


def test_values_above_the_limit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        audits,
        "selftest",
        lambda seed: iter([Finding("sound", False, seed / 1005, 1.0, "epsilon")]),
    )
    path = tmp_path / "audits.json"
    assert (
        audits.main(["--runs", "2", "--planted", "1", "--workers", "1", "--output", str(path)]) == 0
    )
    (row,) = json.loads(path.read_text())["rows"]
    assert row["above"] == 1
    assert len(row["found"]) == 2


def test_the_stored_audits_are_those_of_the_documentation() -> None:
    rows = json.loads((RESULTS / "private" / "audits.json").read_text())["rows"]
    sound = next(row for row in rows if row["training"] == "sound training")
    assert (sound["runs"], sound["above"], f"{max(sound['found']):.2f}") == (100, 0, "0.54")
    planted = [row for row in rows if row["planted"]]
    assert len(planted) == 5
    assert all(row["above"] == row["runs"] == 10 for row in planted)
