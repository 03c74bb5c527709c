"""Runs tests on mutations, each in a fork of a process that has imported everything but pergrad."""

from __future__ import annotations

import compileall
import contextlib
import faulthandler
import importlib
import json
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import hypothesis
import pytest

from mutation.changes import Mutation

__all__ = ["Outcome", "Trial", "import_all_but_the_package", "run_trials"]

# Slow imports of the tests; op_db and transformers take most of the time.
HEAVY = """
    numpy torch torch.testing torch.fx.experimental.proxy_tensor torch._dynamo torch._inductor.compile_fx
    torch.testing._internal.common_methods_invocations torch.testing._internal.common_modules
    torch.testing._internal.common_nn torch.nn.utils._per_sample_grad triton triton.language
    hypothesis.strategies transformers peft
""".split()
_COPIED = "src tests examples benchmarks conftest.py pyproject.toml README.md".split()
_COLLECTION_LIMIT = 120.0  # seconds
PATIENCE = 40.0  # seconds for a test, added to 20 times its usual time

How = Literal["failed", "crashed or hung", "survived", "not run"]


@dataclass(frozen=True)
class Outcome:
    """Whether a mutation was noticed, by which test, and after how many."""

    how: How
    failed: tuple[str, ...] = ()
    tests: int = 0
    seconds: float = 0.0
    log: str = ""  # the end of the log, if it crashed or hung

    @property
    def noticed(self) -> bool:
        return self.how in ("failed", "crashed or hung")

    @property
    def test(self) -> str:
        """Returns the first test that noticed it."""
        return self.failed[0] if self.failed else ""


@dataclass(frozen=True)
class Trial:
    """Holds a mutation, or None, the tests to run on it in order, and their usual seconds."""

    mutation: Mutation | None
    tests: Sequence[str]
    seconds: Sequence[float]
    budget: float
    stop_at_first: bool = True


def import_all_but_the_package(name: str = "pergrad") -> None:
    """Imports the modules that tests need, so that forks need not."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
    )
    settings = hypothesis.settings.default
    for module in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    assert name not in sys.modules
    if "torch" in sys.modules:
        # Importing torch's test databases freezes its flags, and there is no public way to undo it.
        flags = sys.modules["torch"].backends.flags_frozen.__globals__
        flags["__allow_nonbracketed_mutation_flag"] = True
    # Shrinking a failing example takes minutes, and only the failure matters.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", parent=settings, phases=phases, deadline=None, database=None
    )
    hypothesis.settings.load_profile("mutants")


def run_trials(root: Path, trials: Sequence[Trial], workers: int) -> Iterator[tuple[int, Outcome]]:
    """Runs all trials in parallel; yields the number and outcome of each as it ends."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free = []
        for k in range(workers):
            tree = Path(folder, str(k))
            _copy(root, tree)
            free.append(tree)
        waiting = [*enumerate(trials)][::-1]
        running: dict[int, tuple[int, Path, float]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    number, trial = waiting.pop()
                    tree = free.pop()
                    running[_start(root, tree, trial)] = number, tree, time.monotonic()
                process, status = os.wait()
                if process not in running:
                    continue
                number, tree, begun = running.pop(process)
                _kill_group(process)
                yield number, _outcome(tree, status, time.monotonic() - begun)
                _restore(root, tree, trials[number])
                free.append(tree)
        finally:
            for process in running:
                _kill_group(process)


def _copy(root: Path, tree: Path) -> None:
    tree.mkdir()
    for name in _COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy(root / name, tree / name)
    # By hash: time and size cannot tell apart two changes within a second.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(tree / "src", quiet=2, invalidation_mode=mode)


def _start(root: Path, tree: Path, trial: Trial) -> int:
    """Forks a process that runs the trial's tests on the mutation in its tree."""
    if trial.mutation is not None:
        source = trial.mutation.source
        assert source is not None
        (tree / trial.mutation.path).write_text(source)
    (tree / "outcome.jsonl").write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        log = os.open(tree / "log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _enter(root, tree)
        code = _run(tree, trial)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skips the parent's clean-up


def _enter(root: Path, tree: Path) -> None:
    """Redirects all later imports to the copy."""
    os.chdir(tree)
    gone = {"", str(root), str(root / "src")}
    sys.path[:] = [str(tree / "src"), *(p for p in sys.path if p not in gone)]
    os.environ["PYTHONPATH"] = str(tree / "src")  # for processes that tests start
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("tests", "benchmarks", "conftest"):
            del sys.modules[name]


def _run(tree: Path, trial: Trial) -> int:
    files = list(dict.fromkeys(test.partition("::")[0] for test in trial.tests))
    faulthandler.enable(open(tree / "crash", "w"))  # noqa: SIM115
    faulthandler.dump_traceback_later(_COLLECTION_LIMIT, exit=True)
    options = ["-q", "--tb=short", "--no-header", f"--rootdir={tree}"]
    # Plugins are imported before pytest can rewrite their assertions, which is harmless.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    without = ["cacheprovider", "xdist", "faulthandler", "pytest_cov"]
    plugins = [part for name in without for part in ("-p", f"no:{name}")]
    first = ["-x"] if trial.stop_at_first else []
    return int(pytest.main([*options, *plugins, *first, *files], plugins=[_Selected(tree, trial)]))


class _Selected:
    """pytest plugin: runs the wanted tests in the wanted order until the budget is spent."""

    def __init__(self, tree: Path, trial: Trial) -> None:
        self._place = {test: k for k, test in enumerate(trial.tests)}
        self._seconds = dict(zip(trial.tests, trial.seconds, strict=True))
        self._budget = trial.budget
        self._notes = open(tree / "outcome.jsonl", "a", buffering=1)  # noqa: SIM115
        self._begun = 0.0

    def _note(self, what: str, test: str = "") -> None:
        self._notes.write(json.dumps([what, test]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(wanted, key=lambda item: self._place[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note("fail", report.nodeid)

    def pytest_collection_finish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._begun = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if time.monotonic() - self._begun > self._budget:
            item.session.shouldstop = "the time for this mutation is over"
        # On a busy machine a test may take long, but not this long.
        faulthandler.dump_traceback_later(PATIENCE + 20 * self._seconds[item.nodeid], exit=True)
        self._note("start", item.nodeid)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note("fail", report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._note("end")


def _outcome(tree: Path, status: int, seconds: float) -> Outcome:
    notes = [json.loads(line) for line in (tree / "outcome.jsonl").read_text().splitlines()]
    started = [test for what, test in notes if what == "start"]
    failed = [test for what, test in notes if what == "fail"]
    if failed:
        return Outcome("failed", tuple(failed), len(started), seconds)
    if not any(what == "end" for what, _ in notes):
        # A conftest that cannot be imported ends the process before any test.
        log = "".join(
            (tree / name).read_text() for name in ("log", "crash") if (tree / name).exists()
        )
        return Outcome("crashed or hung", tuple(started[-1:]), len(started), seconds, log[-2000:])
    return Outcome("survived" if started else "not run", (), len(started), seconds)


def _restore(root: Path, tree: Path, trial: Trial) -> None:
    if trial.mutation is not None:
        shutil.copy(root / trial.mutation.path, tree / trial.mutation.path)


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
