"""A whole run on a small package: what tests check is noticed, what they only run survives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
def double(x):
    return x * 2


def twice(x):
    return x + x


def untested(x):
    return x + 1


def endless(x):
    while x > 0:
        x -= 1
    return x
"""
TESTS = """
import random

from toy.rules import code


def test_double():
    assert code.double(3) == 6


def test_twice_is_run():
    code.twice(3)


def test_endless():
    assert code.endless(3) == 0
"""
RUN = """
import json
import sys
from pathlib import Path

from mutation import trials
from mutation.__main__ import Runs
from mutation.changes import mutations_of
from mutation.witnesses import Project, Witnesses

root = Path(sys.argv[1])
project = Project(root, "src/toy", ("rules",), ("tests",))
trials.PATIENCE = 2.0
trials.HEAVY = ()
trials.import_all_but_the_package("toy")
witnesses = Witnesses.of(project, workers=1)
mutations = [m for path in project.sources() for m in mutations_of(root, path)]
results = Runs(project, witnesses, 2, 10.0).of(mutations)
print(json.dumps([[m.before, m.after, o.how, o.test] for m, o in results]), file=open("out", "w"))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    pytest.importorskip("pytest_cov")
    root = tmp_path_factory.mktemp("toy")
    for name, text in {
        "src/toy/__init__.py": "",
        "src/toy/rules/__init__.py": "",
        "src/toy/rules/code.py": CODE,
        "tests/rules/test_code.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n',
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-c", RUN, str(root)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=True,
    )
    found = json.loads((root / "out").read_text())
    assert (root / "src/toy/rules/code.py").read_text() == CODE
    return {
        after if after != "pass" else f"no {before}": (how, t) for before, after, how, t in found
    }


@pytest.mark.slow
def test_a_change_that_a_test_checks_is_noticed(outcomes: dict[str, tuple[str, str]]) -> None:
    for change in ("return x / 2", "return x * 3", "return x * 1"):
        assert outcomes[change] == ("failed", "tests/rules/test_code.py::test_double")


@pytest.mark.slow
def test_a_change_that_tests_only_run_survives(outcomes: dict[str, tuple[str, str]]) -> None:
    assert outcomes["return x - x"] == ("survived", "")


@pytest.mark.slow
def test_a_change_that_no_test_runs_is_not_run(outcomes: dict[str, tuple[str, str]]) -> None:
    assert outcomes["return x - 1"] == ("not run", "")


@pytest.mark.slow
def test_an_endless_loop_is_noticed(outcomes: dict[str, tuple[str, str]]) -> None:
    assert outcomes["no x -= 1"] == ("crashed or hung", "tests/rules/test_code.py::test_endless")
