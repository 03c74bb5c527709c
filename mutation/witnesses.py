"""Finds which tests run which lines, by coverage; runs only test files that changed since the last time."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

from mutation.changes import Mutation

__all__ = ["Project", "Uses", "Witnesses"]

# Files with functions that `sys.setprofile` calls: coverage does not see their lines.
_PROFILERS = {"src/pergrad/engine/compiling/guarding/reads.py"}


@dataclass(frozen=True)
class Project:
    """Describes a tree with sources to change and tests to run."""

    root: Path
    package: str = "src/pergrad"
    changed: Sequence[str] = ("factors", "rules", "reductions", "quantities", "engine")
    # Tests of higher layers (audits, reports, the command line) notice much too, but slowly and indirectly.
    tests: Sequence[str] = (
        "tests/factors",
        "tests/rules",
        "tests/reductions",
        "tests/quantities",
        "tests/runtime",
        "tests/engine",
        "tests/distributed/test_one_rank.py",
        "tests/distributed/test_gathering.py",
        "tests/distributed/test_groups.py",
        "tests/distributed/test_pipelines.py",
        "tests/distributed/test_placing.py",
        "tests/distributed/test_spread.py",
        "tests/distributed/test_wrappers.py",
        "tests/test_testing.py",
        "tests/test_peers_wrong_answers.py",
        "tests/test_errors.py",
        "src/pergrad",
    )
    cache: str = ".mutants"

    def sources(self) -> list[Path]:
        folders = [self.root / self.package / name for name in self.changed]
        return sorted(path for folder in folders for path in folder.rglob("*.py"))

    def test_files(self) -> dict[str, str]:
        """Maps the files of all tests to their hashes."""
        found: dict[str, str] = {}
        for name in self.tests:
            path = self.root / name
            if path.is_file():
                files = [path]
            elif name.startswith("src"):  # files with doctests
                files = [p for p in path.rglob("*.py") if ">>>" in p.read_text()]
            else:
                files = [*path.rglob("test_*.py")]
            found |= {f.relative_to(self.root).as_posix(): _hash([f]) for f in sorted(files)}
        return found


@dataclass
class Witnesses:
    """Holds the tests that run each line, and their seconds."""

    sources: dict[str, str] = field(default_factory=dict)  # the text that was covered
    files: dict[str, str] = field(default_factory=dict)  # hashes of test files
    tests: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[int]]] = field(default_factory=dict)  # by source file
    imported: dict[str, set[int]] = field(default_factory=dict)  # lines that an import runs

    @classmethod
    def of(cls, project: Project, *, workers: int, reuse: bool = False) -> Witnesses:
        """Loads the stored coverage of a project, and runs the tests that are new or have changed.

        If a source has changed, runs all tests; with `reuse`, shifts the stored lines instead.
        """
        path = project.root / project.cache / "witnesses.pickle"
        known: Witnesses = pickle.loads(path.read_bytes()) if path.exists() else cls()
        sources = {p.relative_to(project.root).as_posix(): p.read_text() for p in project.sources()}
        if known.sources != sources:
            known = known._moved_to(sources) if reuse and known.sources else cls(sources)
        files = project.test_files()
        known._forget([f for f in known.files if f not in files])
        changed = [f for f, own in files.items() if known.files.get(f) != own]
        if changed:
            print(f"finding the lines that {len(changed)} test files run ...", flush=True)
            known._forget(changed)
            known._cover(project, changed, workers)
            known.files |= {f: files[f] for f in changed}
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(known))
        return known

    def _forget(self, files: Iterable[str]) -> None:
        gone = set(files)
        self.files = {f: own for f, own in self.files.items() if f not in gone}
        self.seconds = {t: s for t, s in self.seconds.items() if _file_of(t) not in gone}
        kept = {k for k, test in enumerate(self.tests) if test in self.seconds}
        self.lines = {
            path: {line: tests & kept for line, tests in lines.items()}
            for path, lines in self.lines.items()
        }

    def _moved_to(self, sources: dict[str, str]) -> Witnesses:
        lines: dict[str, dict[int, set[int]]] = {}
        for path, text in sources.items():
            before, known = self.sources.get(path, ""), self.lines.get(path, {})
            if before == text:
                lines[path] = known
                continue
            moved = lines[path] = {}
            match = difflib.SequenceMatcher(None, before.splitlines(), text.splitlines(), False)
            for _, a, a_end, b, b_end in match.get_opcodes():
                for k in range(b, b_end):
                    old = min(a + k - b, max(a_end - 1, a))
                    moved[k + 1] = set(known.get(old + 1, ()))
        return Witnesses(sources, self.files, self.tests, self.seconds, lines, self.imported)

    def _cover(self, project: Project, files: list[str], workers: int) -> None:
        folder = project.root / project.cache
        folder.mkdir(exist_ok=True)
        data, durations = folder / "coverage", folder / "durations.json"
        config = folder / "coveragerc"
        own = "\n    ".join(str(project.root / project.package / name) for name in project.changed)
        config.write_text(
            f"[run]\ndata_file = {data}\nrelative_files = true\nsource =\n    {own}\n"
        )
        data.unlink(missing_ok=True)
        paths = [project.root / "src", Path(__file__).parents[1]]
        before = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *([before] if before else [])]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        parallel = ["-n", str(workers)] if workers > 1 else []
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel),
            *("-p", "mutation.durations", f"--durations-to={durations}"),
            *("--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="),
            *files,
        ]
        subprocess.run(command, cwd=project.root, env=environment, stdout=sys.stderr, check=False)
        self.add(data, json.loads(durations.read_text()), project.root)

    def add(self, data: Path, seconds: dict[str, float], root: Path) -> None:
        """Adds the results of coverage.py for tests that pass."""
        self.seconds |= seconds
        numbers = {test: k for k, test in enumerate(self.tests)}
        for test in seconds:
            if test not in numbers:
                numbers[test] = len(self.tests)
                self.tests.append(test)
        found = CoverageData(str(data))
        found.read()
        for name in found.measured_files():
            path = Path(name)
            path = path.relative_to(root) if path.is_absolute() else path
            lines = self.lines.setdefault(path.as_posix(), {})
            for line, contexts in found.contexts_by_lineno(name).items():
                tests = lines.setdefault(line, set())
                if "" in contexts:
                    self.imported.setdefault(path.as_posix(), set()).add(line)
                for context in contexts:
                    number = numbers.get(context.rpartition("|")[0])
                    if number is not None:
                        tests.add(number)

    def tests_for(self, mutation: Mutation, uses: Uses) -> list[str]:
        """Orders the tests that can notice a mutation: its own test module first, then short ones.

        Interleaves parametrised tests: each function gets one case before any gets its second.
        """
        where = {mutation.path: set(mutation.witnesses)}
        for name in mutation.names:
            for path, lines in uses.of(name, mutation.path).items():
                where.setdefault(path, set()).update(lines)
        numbers: set[int] = set()
        for path, lines in where.items():
            known = self.lines.get(path, {})
            numbers.update(*(known.get(line, ()) for line in lines))
        if not numbers and self._is_run_by_import(mutation):
            numbers.update(*self.lines.get(mutation.path, {}).values())
        breadth = self._breadth()
        own = _test_module_of(mutation.path)
        if mutation.path in _PROFILERS and not numbers:
            numbers.update(k for k, test in enumerate(self.tests) if _file_of(test) == own)
            numbers = {k for k in numbers if self.tests[k] in self.seconds}
        functions: dict[str, list[int]] = {}
        for k in numbers:
            functions.setdefault(self.tests[k].partition("[")[0], []).append(k)
        ranked: list[tuple[float, str]] = []
        for tests in functions.values():
            tests.sort(key=lambda k: (self.seconds[self.tests[k]], self.tests[k]))
            for turn, k in enumerate(tests):
                test = self.tests[k]
                is_own = _file_of(test) == own
                cost = self.seconds[test] + breadth[k] / 1000
                ranked.append((turn // (4 if is_own else 1) + cost, test))
        return [test for _, test in sorted(ranked)]

    def _is_run_by_import(self, mutation: Mutation) -> bool:
        """Whether only the import of the package runs the line, as for registering a rule."""
        return bool(mutation.names) or not mutation.witnesses.isdisjoint(
            self.imported.get(mutation.path, ())
        )

    def _breadth(self) -> Counter[int]:
        if not hasattr(self, "_counted"):
            self._counted: Counter[int] = Counter()
            for lines in self.lines.values():
                for tests in lines.values():
                    self._counted.update(tests)
        return self._counted


class Uses:
    """Finds where names that a module binds are used inside functions."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._found: dict[str, dict[str, set[int]]] = {}  # by name and file
        for path, text in sources.items():
            for function in ast.walk(ast.parse(text)):
                if not isinstance(function, ast.FunctionDef):
                    continue
                for node in ast.walk(function):
                    name = getattr(node, "id", None) or getattr(node, "attr", None)
                    if name and function.body[0].lineno <= node.lineno:  # type: ignore[attr-defined]
                        own = self._found.setdefault(name, {}).setdefault(path, set())
                        own.add(node.lineno)  # type: ignore[attr-defined]

    def of(self, name: str, path: str) -> dict[str, set[int]]:
        """Returns lines by file; for a private name, in its own file only."""
        found = self._found.get(name, {})
        return {path: found.get(path, set())} if name.startswith("_") else found


def _test_module_of(path: str) -> str:
    inside = Path(path).relative_to("src").parts[1:]
    return Path("tests", *inside[:-1], f"test_{inside[-1]}").as_posix()


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def _hash(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()
