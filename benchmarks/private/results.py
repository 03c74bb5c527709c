"""Runs jobs in processes, and stores results with the machine and the versions."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from benchmarks import rows

__all__ = ["in_processes", "write"]

J = TypeVar("J")
R = TypeVar("R")


def in_processes(work: Callable[[J], R], jobs: Sequence[J], workers: int) -> list[R]:
    """Returns work(job) of all jobs, in order; says how far it is."""
    if workers == 1:
        return [work(job) for job in jobs]
    os.environ["OMP_NUM_THREADS"] = "1"
    found, begun = [], time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for number, result in enumerate(pool.imap(work, jobs), start=1):
            found.append(result)
            seconds = time.perf_counter() - begun
            print(f"\r{number} of {len(jobs)} jobs, {seconds:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def write(
    name: str, device: torch.device, results: dict[str, Any], *, of_commit: str | None = None
) -> None:
    """Writes a result to benchmarks/results/private, with what it was measured on."""
    commit, is_dirty = (of_commit, False) if of_commit is not None else rows.commit()
    where = {
        "machine": rows.machine(device),
        "versions": rows.versions(),
        "commit": commit,
        "dirty": is_dirty,
    }
    path = rows.RESULTS / "private" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**where, **results}, indent=1) + "\n")
    print(f"written to {path}")
