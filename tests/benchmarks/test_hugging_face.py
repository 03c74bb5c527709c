"""The benchmark of Hugging Face models: small ones run, ratios are to training of the same kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import hugging_face
from benchmarks.hugging_face import SUBJECTS, check, document, draw, losses, main, newest
from benchmarks.rows import write
from tests.benchmarks.row_cases import PLAIN

ROW = replace(PLAIN, model="gpt2", model_title="GPT-2", method="pergrad-norms", ratio=1.25)


@pytest.mark.parametrize("name", ["gpt2", "swin-t"])
def test_losses_are_those_of_the_samples_and_norms_are_right(name: str) -> None:
    subject = SUBJECTS[name]
    model = subject.build("cpu")
    batch = subject.batch("cpu", model)
    samples = len(batch["labels"])
    assert losses(model, batch).shape == (samples,)
    assert check(model, batch) == ""


def test_a_wrong_norm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face.pergrad, "norms", lambda *_: torch.zeros(2))
    model = SUBJECTS["gpt2"].build("cpu")
    assert "sample 0 is 0 instead of" in check(model, SUBJECTS["gpt2"].batch("cpu", model))


def test_rows_are_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--models", "gpt2", "--rounds", "1", "--store", "--results", str(tmp_path)]
    assert main(options) == 0
    assert "gpt2 pergrad-norms ok" in capsys.readouterr().out
    text = document(newest(tmp_path))
    assert "| small GPT2LMHeadModel |" in text
    assert "commit" in text


def test_the_newest_rows_and_their_failures_are_shown(tmp_path: Path) -> None:
    write(tmp_path / "cpu-float32-20260101T000000.jsonl", [replace(ROW, ratio=3.0)])
    failed = replace(
        ROW, method="pergrad-norms-compiled", status="failed", note="it broke", ratio=None
    )
    write(tmp_path / "cpu-float32-20260102T000000.jsonl", [ROW, failed])
    text = document(newest(tmp_path))
    assert "| small GPT2LMHeadModel | 1.25 |  | fails |  |  |" in text
    assert "- GPT-2, norms, compiled: it broke" in text


def test_charts_name_models_and_methods(tmp_path: Path) -> None:
    (path,) = draw({"cpu": {"gpt2": {"pergrad-norms": ROW}}}, tmp_path)
    text = path.read_text()
    assert path.name == "benchmark-models-cpu.svg"
    assert "small GPT2LMHeadModel" in text
    assert "norms, recorded" in text


def test_documentation_shows_the_stored_rows() -> None:
    root = Path(__file__).parents[2]
    assert main(["--check", str(root / "docs" / "benchmarks.md")]) == 0


def test_every_model_has_a_real_and_a_small_size() -> None:
    assert len(SUBJECTS) >= 12
    for subject in SUBJECTS.values():
        assert subject.model in dir(hugging_face.transformers)
        assert subject.small
