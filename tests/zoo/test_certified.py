"""The count of false alarms: it runs every precision, and tells an alarm from a certificate."""

import json
from pathlib import Path
from typing import Any

import pytest

import pergrad
from tests.zoo import certified


def test_right_answers_of_a_small_model_are_certified_in_every_precision(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert certified.main(["benchmark: mlp", "--seeds", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["by_precision"] == {name: {"certified": 2} for name in certified.PRECISIONS}
    assert (found["certified"], found["alarms"]) == (2 * len(certified.PRECISIONS), 0)


def test_a_wrong_answer_is_counted_as_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(pergrad.Norms):
        def finish(self) -> Any:
            return 2 * super().finish()

    monkeypatch.setattr(pergrad, "Norms", Wrong)
    (step,) = certified.certified_steps("benchmark: mlp", ["float64"], 1)
    assert step.outcome == "alarm"
    assert "Wrong of sample" in step.why
