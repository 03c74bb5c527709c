import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import measure, rows
from benchmarks.measure import first_line
from benchmarks.methods import METHODS, Method, Step
from benchmarks.models import Task
from benchmarks.run import main, parse


def raising(task: Task) -> Step:
    raise RuntimeError("cannot do it\nat all")


def doubled(task: Task) -> Step:
    inner = METHODS["vmap"].prepare(task)

    def step() -> dict[str, Tensor]:
        return {name: 2 * result for name, result in inner().items()}

    return step


@pytest.fixture
def results(tmp_path: Path) -> Callable[[Method], dict[str, rows.Row]]:
    def run(extra: Method) -> dict[str, rows.Row]:
        path = tmp_path / "tiny.jsonl"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(METHODS, extra.name, extra)
            line = f"--size tiny --rounds 2 --steps 1 --models mlp --methods {extra.name}"
            assert main([*line.split(), "--output", str(path)]) == 0
        return {row.method: row for row in rows.read(path)}

    return run


Run = Callable[[Method], dict[str, rows.Row]]


def test_rows_hold_ratios_to_plain_of_the_same_run(results: Run) -> None:
    found = results(METHODS["vmap"])
    assert list(found) == ["plain", "vmap"]
    assert found["plain"].ratio == found["plain"].memory_ratio == 1.0
    vmap = found["vmap"]
    assert vmap.status == "ok"
    assert vmap.ratio is not None
    assert vmap.ratio > 0
    assert vmap.seconds is not None
    assert vmap.fastest is not None
    assert vmap.fastest <= vmap.seconds
    assert vmap.memory_ratio is not None
    assert vmap.memory_ratio > 1
    assert vmap.provenance.rounds == 2
    assert vmap.provenance.versions.keys() >= {"python", "torch"}


def test_failing_method_is_shown_with_the_first_line_of_its_error(results: Run) -> None:
    row = results(Method("broken", "broken", "grads", raising))["broken"]
    assert (row.status, row.note) == ("failed", "RuntimeError: cannot do it")
    assert row.seconds is row.ratio is row.peak_bytes is None


def test_wrong_method_is_shown_as_wrong_and_not_timed(
    results: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    row = results(Method("double", "double", "grads", doubled))["double"]
    assert row.status == "wrong"
    assert row.note == "layers.0.weight[0]: relative error 1.0e+00, over 1e-06 (float64)"
    assert row.seconds is None
    assert "| double | WRONG |" in capsys.readouterr().out


def test_method_of_a_missing_package_is_skipped_with_a_note(results: Run) -> None:
    absent = replace(METHODS["vmap"], name="absent", requires="no_such_package")
    row = results(absent)["absent"]
    assert (row.status, row.note) == ("skipped", "no_such_package is not installed")


def test_rows_name_no_host_and_no_path(results: Run, tmp_path: Path) -> None:
    results(METHODS["vmap"])
    for line in (tmp_path / "tiny.jsonl").read_text().splitlines():
        stored = json.loads(line)
        assert str(tmp_path) not in line
        assert "/" not in stored["provenance"]["machine"]


def test_output_that_exists_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    path = tmp_path / "there.jsonl"
    path.write_text("kept")
    with pytest.raises(SystemExit):
        main(["--size", "tiny", "--output", str(path)])
    assert path.read_text() == "kept"


def test_quantity_takes_its_methods_and_the_bases_alone() -> None:
    chosen = parse(["--quantity", "norms", "--no-compiled"]).methods
    assert chosen[:2] == ["plain", "inputs"]
    assert {METHODS[name].quantity for name in chosen[2:]} == {"norms"}
    assert not any(METHODS[name].compiled for name in chosen)
    with_compiled = parse(["--quantity", "norms"]).methods
    assert {METHODS[name].name for name in with_compiled if METHODS[name].compiled} == {
        "plain-compiled",
        "inputs-compiled",
        "pergrad-norms-compiled",
        "vmap-norms-compiled",
    }


def test_all_quantities_are_run_by_default() -> None:
    on_cpu = {name for name, method in METHODS.items() if not method.graphs}
    assert set(parse([]).methods) == on_cpu
    eager = {name for name in on_cpu if not METHODS[name].compiled}
    assert set(parse(["--no-compiled"]).methods) == eager


def test_only_a_run_of_all_methods_to_its_quantities_is_stored_unasked() -> None:
    assert parse(["--quantity", "norms"]).full
    assert not parse(["--quantity", "norms", "--models", "mlp"]).full
    assert not parse(["--methods", "vmap"]).full


@pytest.mark.parametrize(
    "line",
    [
        "--methods plain-compiled --no-compiled",
        "--methods vmap --quantity grads",
        "--quantity training",
    ],
)
def test_contradicting_choices_are_refused(line: str) -> None:
    with pytest.raises(SystemExit):
        parse(line.split())


@pytest.mark.slow
def test_stopped_run_keeps_the_rows_of_the_rounds_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stops = tmp_path / "tiny.jsonl", {"mlp": 99, "lstm": 2}

    def stopped(model: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        for number, entries in enumerate(measure.measure(model, *arguments, **options)):
            if number == stops[model]:
                raise KeyboardInterrupt
            yield entries

    monkeypatch.setattr("benchmarks.run.measure", stopped)
    line = "--size tiny --rounds 3 --steps 1 --models mlp lstm --methods plain inputs"
    with pytest.raises(KeyboardInterrupt):
        main([*line.split(), "--output", str(path)])
    found = [(row.model, row.method, row.provenance.rounds) for row in rows.read(path)]
    assert found == [
        ("mlp", "plain", 3),
        ("mlp", "inputs", 3),
        ("lstm", "plain", 2),
        ("lstm", "inputs", 2),
    ]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_run_past_its_budget_measures_what_is_prepared_once_and_says_what_is_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tiny.jsonl"
    line = "--size tiny --rounds 3 --steps 1 --models mlp --methods plain inputs --budget 1e-9"
    assert main([*line.split(), "--output", str(path)]) == 0
    plain, inputs = rows.read(path)
    assert (plain.status, plain.provenance.rounds) == ("ok", 1)
    assert (inputs.status, inputs.note) == ("skipped", "past the time for mlp, 0 s")


def test_checks_as_timed_alone_are_said_in_the_rows_and_still_find_a_wrong_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.jsonl"
    monkeypatch.setitem(METHODS, "double", Method("double", "double", "grads", doubled))
    line = "--size tiny --rounds 1 --steps 1 --models mlp --methods double --checks timed"
    assert main([*line.split(), "--output", str(path)]) == 0
    plain, double = rows.read(path)
    assert (plain.status, plain.provenance.checks) == ("ok", "timed")
    assert double.status == "wrong"
    assert double.note.endswith("(float32)")


def test_gpu_runs_have_a_budget_and_their_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu, cpu = parse(["--size", "gpu"]), parse([])
    assert (gpu.budget, gpu.rounds, gpu.steps) == (540.0, 7, 10)
    assert (cpu.budget, cpu.rounds, cpu.steps) == (None, 15, 3)


def test_precision_has_its_usual_short_names() -> None:
    assert parse(["--precision", "bf16"]).precision == "bfloat16"


@pytest.mark.slow
def test_machine_without_git_and_peers_runs_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    absent = {"opacus", "fastDP", "backpack", "jax", "matplotlib"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else found(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "tiny.jsonl"
    line = "--size tiny --rounds 1 --steps 1 --models mlp --no-compiled --commit 0123"
    assert main([*line.split(), "--output", str(path)]) == 0
    results = rows.read(path)
    assert {row.provenance.commit for row in results} == {"0123"}
    skipped = {row.method for row in results if row.status == "skipped"}
    assert skipped == {m.name for m in METHODS.values() if m.requires in absent}
    assert {row.status for row in results if row.method not in skipped} == {"ok"}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (ValueError(), "ValueError"),
        (KeyError("k"), "KeyError: 'k'"),
    ],
)
def test_first_line_has_type_and_reason(error: Exception, line: str) -> None:
    assert first_line(error) == line
