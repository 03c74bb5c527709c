"""Runs checks on several ranks: `python -m tests.distributed.ranks MODULE WORLD [NAMES]`.

It prints, as JSON, how each check ended. A check is a function of a module whose name begins with `check_`.
All checks of a module share one session: a process that has imported torch forks the ranks, which run the
checks in order, over gloo on 127.0.0.1.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.starting import Started

ROOT = Path(__file__).parents[2]
TIMEOUT = timedelta(seconds=60)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def checks_of(module: str) -> dict[str, Callable[[], None]]:
    found = vars(importlib.import_module(module))
    return {name: check for name, check in found.items() if name.startswith("check_")}


def run(module: str, world: int, names: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Runs a session of all checks, or some; returns the errors of each by rank, empty if it passed."""
    process = Started("tests.distributed.ranks", module, str(world), *names, cwd=ROOT, **LOOPBACK)
    out, err = process.communicate(timeout=300)
    assert out, err
    found: dict[str, dict[str, str]] = json.loads(out.splitlines()[-1])
    return found


def output_of(*arguments: str) -> str:
    """Runs Python in another process; returns what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            **LOOPBACK,
        },
    )
    assert done.stdout, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def in_ranks(work: Callable[[int], Any], world: int) -> list[Any]:
    """Forks a process for each rank; returns what `work` gives there."""
    pipes = []
    port = free_port()
    for rank in range(world):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            try:
                init = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init, TIMEOUT, world_size=world, rank=rank)
                found = work(rank)
                dist.destroy_process_group()
            except BaseException:
                found = {"session": traceback.format_exc()}
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(found))
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    found = []
    for reading in pipes:
        with os.fdopen(reading) as pipe:
            text = pipe.read()
            found.append(json.loads(text) if text else {"session": "the rank died"})
    for _ in range(world):
        os.wait()
    return found


def errors_of(checks: dict[str, Callable[[], None]]) -> dict[str, str]:
    """Runs the checks on one rank; all ranks stop where one has failed."""
    errors: dict[str, str] = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check()
        except Exception:
            errors[name] = traceback.format_exc()
        failed = torch.tensor([float(name in errors)])
        try:
            dist.all_reduce(failed)
        except RuntimeError as error:
            errors.setdefault(name, f"the ranks do not come together after it: {error}")
            break
        if failed.item() and name not in errors:
            errors[name] = "passed here"
    return errors


def main(module: str, world: int, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    checks = checks_of(module)
    checks = {name: checks[name] for name in names or checks}
    found = in_ranks(lambda _: errors_of(checks), world)
    by_check = {
        name: {str(rank): errors[name] for rank, errors in enumerate(found) if name in errors}
        for name in ["session", *checks]
    }
    print(json.dumps(by_check))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
