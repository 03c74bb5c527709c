"""The benchmark of Hugging Face models: small ones run, ratios are to training of the same kind."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from benchmarks.hugging_face import measuring, subjects, together
from benchmarks.hugging_face.__main__ import main
from benchmarks.hugging_face.measuring import check, prepare, timed
from benchmarks.hugging_face.subjects import SUBJECTS, losses
from benchmarks.hugging_face.table import document, draw, newest
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
    monkeypatch.setattr(measuring.pergrad, "norms", lambda *_: torch.zeros(2))
    model = SUBJECTS["gpt2"].build("cpu")
    assert "sample 0 is 0 instead of" in check(model, SUBJECTS["gpt2"].batch("cpu", model))


def test_each_run_that_a_table_shows_is_named() -> None:
    later = replace(ROW.provenance, date="2027-01-01T00:00:00+00:00", commit="later")
    found = {"gpu": {"gpt2": {"plain": ROW}, "bert": {"plain": replace(ROW, provenance=later)}}}
    (caption,) = [line for line in document(found).splitlines() if "commit" in line]
    assert caption.count("commit") == 2
    assert caption.index(ROW.provenance.commit) < caption.index("later")


def test_rows_are_stored_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--models", "gpt2", "--rounds", "1", "--store", "--results", str(tmp_path)]
    assert main(options) == 0
    assert "gpt2 pergrad-norms ok" in capsys.readouterr().out
    text = document(newest(tmp_path))
    assert "| small GPT2LMHeadModel |" in text
    assert "commit" in text


def test_a_step_that_fails_or_lacks_memory_is_noted_and_the_others_are_timed() -> None:
    made = prepare("gpt2", "cpu", torch.device("cpu"), is_compiled=False)
    lacks = [True]

    def hungry() -> None:
        if lacks.pop():
            lacks.append(False)
            raise torch.OutOfMemoryError("no room")
        lacks.append(False)

    def broken() -> None:
        raise ValueError("broken\nwith details")

    def hungry_compiler() -> None:
        raise RuntimeError("the backend raised:\nCUDA out of memory")

    made.steps["hungry"] = "norms", hungry
    made.steps["broken"] = "norms", broken
    made.steps["compiler"] = "norms", hungry_compiler
    for name in ("hungry", "broken", "compiler"):
        made.warm_up(name)
    assert made.lacked_memory == {"hungry", "compiler"}
    by_name = {row.method: row for row in timed(made, 1, ROW.provenance)}
    assert by_name["hungry"].status == "ok"
    assert by_name["broken"].status == "failed"
    assert by_name["broken"].note == "ValueError: broken with details"
    assert by_name["pergrad-norms"].first_seconds is not None


def test_no_method_is_prepared_after_the_budget() -> None:
    made = prepare("gpt2", "cpu", torch.device("cpu"), is_compiled=False, budget=0.0)
    assert made.first == {}
    statuses = {row.status for row in timed(made, 1, ROW.provenance)}
    assert statuses == {"failed"}
    assert "not tried" in made.notes["plain"]


def test_models_prepared_together_are_timed_in_turn_and_a_dead_process_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(together.multiprocessing, "get_context", lambda _: context)

    def work(pipe: Connection, name: str, size: str, plan: dict[str, bool]) -> None:
        assert plan == {"is_compiled": True}
        if name == "bert":
            return
        pipe.send("ready")
        rounds, provenance, _ = pipe.recv()
        pipe.send([replace(ROW, model=name, note=f"{rounds}", provenance=provenance)])

    monkeypatch.setattr(together, "_work", work)
    names = ["gpt2", "bert", "swin-t"]
    found = [*together.measured(names, "gpu", 3, ROW.provenance, {"is_compiled": True})]
    assert [(rows[0].model, rows[0].note) for rows in found] == [("gpt2", "3"), ("swin-t", "3")]
    assert "bert: its process ended before it was ready" in capsys.readouterr().out


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
        assert subject.model in dir(subjects.transformers)
        assert subject.small
