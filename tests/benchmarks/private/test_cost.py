"""All methods of the cost benchmark run on a tiny model, and rows are stored with their ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.private import cost


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_uncompiled_methods_are_measured(tmp_path: Path) -> None:
    methods = [n for n in cost.METHODS if not n.endswith(("compiled", "CUDA graphs"))]
    path = tmp_path / "cost.json"
    assert (
        cost.main(["--size", "tiny", "--rounds", "2", "--methods", *methods, "--output", str(path)])
        == 0
    )
    found = json.loads(path.read_text())
    assert [row["method"] for row in found["rows"]] == methods
    assert found["failed"] == {}
    assert found["rows"][0]["ratio"] == 1
    assert found["rows"][0]["ratio_compiled"] is None  # compiled training was not measured
    assert all(row["milliseconds_per_sample"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("device", "ratio", "without"),
    [
        ("cpu", "ratio", ("plain", "plain, compiled")),
        ("cuda", "ratio_compiled", ("plain, compiled",)),
    ],
)
def test_the_page_shows_the_stored_ratios(
    device: str, ratio: str, without: tuple[str, ...]
) -> None:
    root = Path(__file__).parents[3]
    stored = json.loads((root / f"benchmarks/results/private/cost-{device}.json").read_text())
    ratios = [f"{row[ratio]:.2f}" for row in stored["rows"] if row["method"] not in without]
    assert "| " + " | ".join(ratios) + " |" in (root / "docs/howto/private.md").read_text()
