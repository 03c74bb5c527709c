"""Measures training with in-run values at their defaults, on the benchmark's transformer for a CPU.

Run as ``python -m benchmarks.in_run_cost``; ``--store`` keeps the rows. A run is as many steps as one
validation gradient lasts, 40 by default; its validation batch is as large as the training batch. Plain runs
and runs with values alternate, on one thread and in CPU time of that thread. The fastest of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.fastest import fastest, fastest_rows, run_on_one_thread
from benchmarks.models import MODELS, Size, Task
from benchmarks.rows import Row, provenance
from pergrad.index import InRunValues

TITLES = {"plain": "plain training", "in-run": "training with InRunValues"}
_EVERY, _REFRESH = 10, 4  # the defaults of InRunValues


def runs(task: Task, steps: int) -> dict[str, Callable[[], None]]:
    """Returns plain training for some steps, and training with values."""
    model, size = task.model, len(task.inputs)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(model(x), y)

    values = InRunValues(model, loss, (task.inputs.clone(), task.targets.clone()), size)

    def plain() -> None:
        for _ in range(steps):
            loss(model, task.inputs, task.targets).backward()
            model.zero_grad(set_to_none=True)

    def valued() -> None:
        for _ in range(steps):
            with values.step(range(size)):
                loss(model, task.inputs, task.targets).backward()
            model.zero_grad(set_to_none=True)

    return {"plain": plain, "in-run": valued}


def rows(size: Size, rounds: int, seed: int) -> list[Row]:
    """Returns the rows of plain training and of training with values; seconds are of one step."""
    torch.manual_seed(seed)
    case, steps = MODELS["transformer"][size], _EVERY * _REFRESH
    timed = fastest(runs(case.build(), steps), rounds, warm_up=0, clock=time.thread_time)
    return fastest_rows(
        {name: seconds / steps for name, seconds in timed.items()},
        TITLES,
        size=size,
        model="transformer",
        model_title=case.title,
        quantity="in-run values",
        note=f"the fastest {steps} steps in CPU time; `ratio` is of the fastest",
        provenance=provenance(
            torch.device("cpu"), of_commit=None, rounds=rounds, steps=steps, seed=seed
        ),
    )


def main(arguments: list[str] | None = None) -> None:
    run_on_one_thread(rows, arguments, description=__doc__, folder="in_run_cost", rounds=4)


if __name__ == "__main__":
    main()
