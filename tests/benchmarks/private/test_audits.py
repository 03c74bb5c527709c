"""Audits are counted and stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.private import audits
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
