"""Measures norms that are recorded while `.grad` is filled, on the benchmark's transformer for a CPU.

Run as ``python -m benchmarks.kept_cost``; ``--store`` keeps the rows. Plain and recorded steps alternate, on
one thread and in CPU time of that thread. The fastest of each counts, and the ratio is of these two.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import pergrad
from benchmarks.fastest import fastest, fastest_rows, run_on_one_thread
from benchmarks.models import MODELS, Size, Task
from benchmarks.rows import Row, provenance

TITLES = {"plain": "plain training", "keep_grad": "record(..., keep_grad=True)"}


def steps(task: Task) -> dict[str, Callable[[], None]]:
    """Returns a plain step, and one that records norms and fills `.grad` as well."""

    def loss() -> torch.Tensor:
        return task.loss(task.model(task.inputs), task.targets)

    def plain() -> None:
        loss().backward()
        task.model.zero_grad(set_to_none=True)

    def kept() -> None:
        with pergrad.record(task.model, pergrad.Norms(), keep_grad=True):
            loss().backward()
        task.model.zero_grad(set_to_none=True)

    return {"plain": plain, "keep_grad": kept}


def rows(size: Size, rounds: int, seed: int) -> list[Row]:
    """Returns the rows of plain training and of norms with `.grad`."""
    torch.manual_seed(seed)
    case = MODELS["transformer"][size]
    timed = steps(case.build())
    return fastest_rows(
        fastest(timed, rounds, warm_up=3, clock=time.thread_time),
        TITLES,
        size=size,
        model="transformer",
        model_title=case.title,
        quantity="norms",
        note="the fastest step in CPU time; `ratio` is of the fastest",
        provenance=provenance(
            torch.device("cpu"), of_commit=None, rounds=rounds, steps=1, seed=seed
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    run_on_one_thread(rows, arguments, description=__doc__, folder="kept_cost", rounds=40)


if __name__ == "__main__":
    main()
