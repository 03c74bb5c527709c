"""Starts modules in processes of their own: forks of one that has imported torch, which takes seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
# A module that cannot be imported is left out: each process imports it then.
FORKS.set_forkserver_preload(
    """
    torch.distributed.fsdp torch.distributed.tensor.parallel torch.distributed.pipelining pytest
    pergrad pergrad.private pergrad.cli.app pandas
    """.split()
)


class Started:
    """A process that runs a module as `python -m` does; it ends with the process that has started it."""

    def __init__(self, module: str, *arguments: str, cwd: Path, **environment: str) -> None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self._outputs = [Path(folder, name) for name in ("out", "err")]
        for path in self._outputs:
            path.touch()
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process = FORKS.Process(
            target=_run, args=(module, arguments, str(cwd), variables, self._outputs), daemon=True
        )
        self._process.start()

    @property
    def printed(self) -> str:
        """Returns what it has printed until now."""
        return self._outputs[0].read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, how: int) -> None:
        if self.returncode is None:
            assert self._process.pid is not None
            os.kill(self._process.pid, how)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Waits for its end; returns what it has printed, and its errors."""
        self._process.join(timeout)
        out, err = (path.read_text() for path in self._outputs)
        assert self._process.exitcode is not None, f"it still runs after {timeout} s:\n{out}{err}"
        return out, err


def _run(
    module: str,
    arguments: Sequence[str],
    cwd: str,
    environment: dict[str, str],
    outputs: Sequence[Path],
) -> None:
    for descriptor, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
