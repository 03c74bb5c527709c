"""pytest plugin that writes how long each passing test took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

__all__ = ["Durations"]


class Durations:
    """Collects seconds by test; leaves out tests that fail, are skipped or have an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" and report.passed:
            self._passed.add(name)
        elif report.failed:
            self._passed.discard(name)

    def pytest_sessionfinish(self) -> None:
        passed = {name: t for name, t in self._seconds.items() if name in self._passed}
        self._path.write_text(json.dumps(passed))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", help="file for the seconds of each test that passes")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--durations-to")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(Path(path)))
