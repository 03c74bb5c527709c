from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fastest as module
from benchmarks.fastest import fastest, run_on_one_thread
from benchmarks.models import Size
from benchmarks.rows import Row, read
from tests.benchmarks.row_cases import PLAIN


def _clock(taken: list[float]) -> Iterator[float]:
    """Readings before and after runs that take so long."""
    now = 0.0
    for seconds in taken:
        yield now
        now += seconds
        yield now


def test_the_fastest_run_counts_and_those_to_warm_up_do_not() -> None:
    order: list[str] = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    readings = _clock([0.1, 0.2, 5.0, 4.0, 3.0, 6.0])
    found = fastest(functions, 2, warm_up=1, clock=lambda: next(readings))
    assert order == ["a", "b"] * 3
    assert {name: round(seconds, 6) for name, seconds in found.items()} == {"a": 3.0, "b": 4.0}


def test_a_run_on_one_thread_shows_its_rows_and_keeps_them_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()

    def rows(size: Size, rounds: int, seed: int) -> list[Row]:
        asked.append((size, rounds, seed))
        assert torch.get_num_threads() == 1
        return [PLAIN]

    monkeypatch.setattr(module, "RESULTS", tmp_path)
    options: dict[str, Any] = {"description": "d", "folder": "some_cost", "rounds": 7}
    try:
        assert run_on_one_thread(rows, ["--size", "tiny"], **options) == [PLAIN]
        assert not [*tmp_path.iterdir()]
        run_on_one_thread(rows, ["--rounds", "2", "--seed", "3", "--store"], **options)
    finally:
        torch.set_num_threads(threads)
    assert asked == [("tiny", 7, 0), ("cpu", 2, 3)]
    (path,) = (tmp_path / "some_cost").glob("cpu-*.jsonl")
    assert read(path) == [PLAIN]
    assert capsys.readouterr().out.count(PLAIN.model_title) == 2
