"""A reproduction is a script of its own."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuzz.programs import Program, Step
from fuzz.registry import Sizes
from fuzz.reproduction import reproduction


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("names", [("kept_order",), ("function_of_weight", "scripted")])
def test_it_runs_without_the_fuzzer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    program = Program(Sizes(3, 2, 4), "vec", tuple(Step(name, 0) for name in names), "labels")
    script = tmp_path / "program.py"
    script.write_text(reproduction(program, why="wrong: off"))
    assert "fuzz" not in script.read_text()
    runpy.run_path(str(script))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 2
    for line in printed:
        assert float(line.split()[2]) < 1e-9


@pytest.mark.parametrize("name", ["in_halves", "in_compiled_step"])
def test_it_runs_in_the_mode_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(reproduction(Program(Sizes(3, 2, 4), "vec", (Step(name, 1),))))
    runpy.run_path(str(script))
    assert capsys.readouterr().out


def test_it_has_only_the_functions_that_it_calls() -> None:
    text = reproduction(Program(Sizes(3, 2, 4), "vec", (Step("numpy_function", 0),)))
    assert "class NumpySin" in text
    assert "class Centre" not in text
    assert "import numpy" in text
    assert "checkpoint" not in text
