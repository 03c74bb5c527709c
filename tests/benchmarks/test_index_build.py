"""The benchmark of building an index runs on a tiny model, and stores its rows."""

from functools import partial
from pathlib import Path

import pytest
import torch

import pergrad
from benchmarks import index_build, rows
from benchmarks.hugging_face.subjects import SUBJECTS
from pergrad.index.rows import computing


def test_rows_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = partial(pergrad.compiled, backend="eager")  # the compiler takes a minute
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(pergrad, "compiled", compiled)
    monkeypatch.setattr(computing, "compiled", compiled)
    options = ["--rounds", "1", "--store", "--commit", "abc", "--results", str(tmp_path)]
    assert index_build.main(options) == 0
    (path,) = tmp_path.glob("tiny-float32-count-*.jsonl")
    found = {row.method: row for row in rows.read(path)}
    assert list(found) == ["plain-compiled", "pergrad-norms-compiled", "index-build"]
    built = found["index-build"]
    assert built.seconds is not None
    assert "2048 numbers a row" in built.note
    assert "uncompiled" not in built.note
    assert built.ratio == pytest.approx(built.seconds / (found["plain-compiled"].seconds or 0))


def test_the_model_is_that_of_the_other_benchmark() -> None:
    setting, subject = index_build.SETTINGS["gpu"], SUBJECTS["llama-1b"]
    assert setting.config == subject.real
    assert (setting.samples, setting.tokens) == subject.shape
    assert setting.batches >= 100  # from which steps are compiled by default
