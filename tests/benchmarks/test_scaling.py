from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import rows
from benchmarks.methods import METHODS, Step
from benchmarks.models import Task
from benchmarks.scaling import AXES, QUANTITIES, SWEEPS, main, newest, read


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scaling") / "tiny.jsonl"
    line = "--size tiny --rounds 1 --steps 1 --commit 0123"
    assert main([*line.split(), "--output", str(path)]) == 0
    return path


@pytest.mark.slow
def test_every_point_of_every_axis_has_time_and_memory_of_every_quantity(stored: Path) -> None:
    points = read(stored)
    expected = {
        (axis, value, quantity)
        for axis, values in SWEEPS["tiny"].values.items()
        for value in values
        for quantity in QUANTITIES
    }
    assert {(p.axis, p.value, p.quantity) for p in points} == expected
    assert {p.status for p in points} == {"ok"}
    for point in points:
        assert point.seconds is not None
        assert point.peak_bytes is not None
        assert getattr(point.shape, point.axis) == point.value
        assert point.provenance.commit == "0123"


@pytest.mark.slow
def test_file_that_is_there_is_refused(stored: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--size", "tiny", "--output", str(stored)])


@pytest.mark.slow
def test_quantity_that_does_not_fit_goes_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = METHODS["pergrad-norms"]

    def too_large(task: Task) -> Step:
        if task.inputs.shape[0] == 1 and task.inputs.shape[1] == 4:
            raise torch.OutOfMemoryError("no room")
        return plain.prepare(task)

    monkeypatch.setitem(METHODS, "pergrad-norms", replace(plain, prepare=too_large))
    path = tmp_path / "tiny.jsonl"
    assert main(["--size", "tiny", "--rounds", "1", "--output", str(path)]) == 0
    norms = [p for p in read(path) if p.quantity == "norms"]
    by_batch = [(p.status, p.note) for p in norms if p.axis == "batch"]
    reason = "OutOfMemoryError: no room"
    assert by_batch == [("failed", reason), ("skipped", f"batch 1: {reason}")]
    assert {p.status for p in norms if p.axis != "batch"} == {"ok"}
    assert {p.status for p in read(path) if p.quantity != "norms"} == {"ok"}


@pytest.mark.slow
def test_points_past_the_budget_are_left_out_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    assert main(["--size", "tiny", "--budget", "0", "--output", str(path)]) == 0
    assert {(p.status, p.note) for p in read(path)} == {("skipped", "past the budget of 0 s")}


@pytest.mark.slow
def test_stopped_sweep_keeps_the_values_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = METHODS["plain"]

    def stopped(task: Task) -> Step:
        if task.inputs.shape == (2, 2):
            raise KeyboardInterrupt
        return plain.prepare(task)

    monkeypatch.setitem(METHODS, "plain", replace(plain, prepare=stopped))
    path = tmp_path / "tiny.jsonl"
    with pytest.raises(KeyboardInterrupt):
        main(["--size", "tiny", "--rounds", "1", "--output", str(path)])
    assert {(p.axis, p.value) for p in read(path)} == {("batch", 1), ("batch", 2)}


@pytest.mark.slow
def test_each_axis_is_from_the_newest_run_that_has_come_to_it(stored: Path, tmp_path: Path) -> None:
    points = read(stored)
    rows.update(tmp_path / "tiny.jsonl", points)
    run = replace(points[0].provenance, date="2100-01-01T00:00:00+00:00")
    later = [replace(p, provenance=run) for p in points if p.axis != "length"]
    stopped = [replace(p, status="skipped") if p.axis == "width" else p for p in later]
    rows.update(tmp_path / "a.jsonl", stopped)
    (found,) = newest(tmp_path)
    assert list(dict.fromkeys(p.axis for p in found)) == list(AXES)
    assert {p.axis for p in found if p.provenance == run} == {"batch"}
    assert {p.status for p in found} == {"ok"}


@pytest.mark.slow
def test_axes_that_are_asked_for_are_varied_in_that_order(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    line = "--size tiny --rounds 1 --steps 1 --axes width batch"
    assert main([*line.split(), "--output", str(path)]) == 0
    assert list(dict.fromkeys(p.axis for p in read(path))) == ["width", "batch"]


def test_sweeps_vary_what_the_axes_name_around_their_base() -> None:
    for sweep in SWEEPS.values():
        assert sweep.values.keys() == AXES.keys()
        for axis, values in sweep.values.items():
            assert values == sorted(values)
            assert getattr(sweep.base, axis) in values
