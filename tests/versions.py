"""Writes which versions of torch and Triton the tests passed with, from files that runs have stored.

``python -m tests.versions --run`` runs the tests and, if all pass, stores their counts in ``tests/tested/``;
``--write FILE`` puts the table of what is stored between the two markers in the file; ``--check FILE`` exits
1 where the file differs. Without an option it prints the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import placed

__all__ = ["END", "FOLDER", "START", "Run", "main", "stored", "table"]

START, END = "<!-- versions-table:start -->", "<!-- versions-table:end -->"
FOLDER = Path(__file__).parent / "tested"


@dataclass(frozen=True)
class Run:
    """The counts of one run of all tests in which none failed."""

    torch: str
    triton: str
    python: str
    machine: str  # CPU, or the name of the GPU
    passed: int
    skipped: int

    @property
    def file_name(self) -> str:
        """One file for each minor version and kind of machine: a later run replaces an earlier one."""
        kind = "cpu" if self.machine == "CPU" else "gpu"
        return f"torch-{'.'.join(self.torch.split('.')[:2])}-{kind}.json"


class _Counter:
    """Counts the outcomes that pytest reports at its end, of all its workers together."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self.counts = {kind: len(reports) for kind, reports in terminalreporter.stats.items()}


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def _run(pytest_arguments: Sequence[str]) -> Run | None:
    """Run pytest here; None where a test failed or pytest itself did."""
    counter = _Counter()
    if pytest.main([*pytest_arguments], plugins=[counter]) != pytest.ExitCode.OK:
        return None
    return Run(
        torch=_version("torch"),
        triton=_version("triton"),
        python=platform.python_version(),
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        passed=counter.counts.get("passed", 0),
        skipped=counter.counts.get("skipped", 0),
    )


def stored(folder: Path = FOLDER) -> list[Run]:
    """The runs in a folder, those with the oldest torch first."""
    runs = [Run(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(runs, key=lambda run: ([*map(int, run.torch.split("."))], run.machine))


def table(runs: Iterable[Run]) -> str:
    """The runs as a table.

    >>> print(table([Run("2.11.0", "3.6.0", "3.11.7", "CPU", 12345, 67)]))
    | torch | Triton | Python | machine | tests passed | tests skipped |
    |---|---|---|---|---|---|
    | 2.11.0 | 3.6.0 | 3.11.7 | CPU | 12,345 | 67 |
    """
    lines = [
        "| torch | Triton | Python | machine | tests passed | tests skipped |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [run.torch, run.triton, run.python, run.machine]
        lines.append(f"| {' | '.join(cells)} | {run.passed:,} | {run.skipped:,} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--run", action="store_true", help="run all tests and store the counts")
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--workers", default="2", help="processes that run tests (default: 2)")
    options = parser.parse_args(arguments)
    if options.run:
        run = _run(["-n", options.workers, "--dist", "loadfile"])
        if run is None:
            print("the tests did not pass; nothing is stored", file=sys.stderr)
            return 1
        folder.mkdir(exist_ok=True)
        (folder / run.file_name).write_text(json.dumps(asdict(run), indent=2) + "\n")
        return 0
    found = table(stored(folder))
    path: Path | None = options.write or options.check
    if path is None:
        print(found)
        return 0
    text = path.read_text()
    wanted = placed(text, found, START, END)
    if options.write is not None:
        path.write_text(wanted)
    elif text != wanted:
        print(
            f"{path}: the versions are not those of {folder}; run "
            f"python -m tests.versions --write {path}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
