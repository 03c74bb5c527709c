from __future__ import annotations

import threading
import time
from pathlib import Path

from benchmarks.turns import Turns


def test_nobody_is_timed_while_another_prepares(tmp_path: Path) -> None:
    path, order = tmp_path / "turns", []
    prepares, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        with Turns(path).preparing():
            prepares.set()
            may_end.wait()
            order.append("prepared")

    def quick() -> None:
        turns = Turns(path)
        with turns.preparing():
            pass
        with turns.timing():
            order.append("timed")

    first = threading.Thread(target=slow)
    first.start()
    prepares.wait()
    second = threading.Thread(target=quick)
    second.start()
    time.sleep(0.05)
    assert order == []
    may_end.set()
    first.join()
    second.join()
    assert order == ["prepared", "timed"]


def test_a_run_without_a_file_never_waits() -> None:
    turns = Turns(None)
    with turns.preparing(), turns.timing():
        pass
