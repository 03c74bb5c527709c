"""Measures what a certificate costs on top of a recorded step, in plain training steps.

Run as ``python -m benchmarks.certificate_cost``; ``--store`` keeps the rows. All steps alternate, so that a
slow phase of the machine affects all of them; the fastest of each counts, in CPU time of this thread. The
steps add to each other: norms, their attribution, two samples, and samples that mix.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from benchmarks.fastest import fastest, fastest_rows, run_on_one_thread
from benchmarks.models import MODELS, Size, Task, build
from benchmarks.rows import Row, provenance
from pergrad.engine.checking.certification import certified_run
from pergrad.engine.recording.options import Options
from pergrad.quantities import Quantity

_TITLES = {
    "plain": "plain training",
    "norms": "norms",
    "attribution": "norms, attribution certified",
    "samples": "norms, two samples checked too",
    "all": "norms, mixing tried too",
}


class _Unchecked(pergrad.Norms):
    """Norms whose samples a certificate does not compare."""

    sample_report = Quantity.sample_report  # type: ignore[assignment]


def _losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return each.view(len(inputs), -1).sum(1)


def steps(task: Task) -> dict[str, Callable[[], None]]:
    """Returns a plain step, a recorded one, and certified ones."""
    model, batch, options = task.model, (task.inputs, task.targets), Options()

    def plain() -> None:
        _losses(model, *batch).sum().backward()
        model.zero_grad(set_to_none=True)

    def norms() -> None:
        pergrad.norms(model, _losses, *batch)

    def certified(quantity: type[pergrad.Norms], mixing: bool) -> Callable[[], None]:
        def step() -> None:
            _, report = certified_run(model, _losses, batch, [quantity()], options, mixing=mixing)
            report.check()

        return step

    return {
        "plain": plain,
        "norms": norms,
        "attribution": certified(_Unchecked, False),
        "samples": certified(pergrad.Norms, False),
        "all": certified(pergrad.Norms, True),
    }


def rows(size: Size, rounds: int, seed: int) -> list[Row]:
    """Returns rows of each step of each model."""
    found: list[Row] = []
    device = torch.device("cpu")
    made = provenance(device, of_commit=None, rounds=rounds, steps=1, seed=seed)
    for name, sizes in MODELS.items():
        timed = steps(build(name, size, seed=seed, device=device))
        found += fastest_rows(
            fastest(timed, rounds, warm_up=1, clock=time.thread_time),
            _TITLES,
            size=size,
            model=name,
            model_title=sizes[size].title,
            quantity="norms",
            note="the fastest step; `ratio` is of the fastest",
            provenance=made,
        )
    return found


def on_top(found: list[Row], model: str) -> float:
    """Returns what attribution costs on top of recorded norms, in plain steps."""
    ratio = {row.method: row.ratio for row in found if row.model == model}
    recorded, certified = ratio["norms"], ratio["attribution"]
    assert recorded is not None
    assert certified is not None
    return certified - recorded


def main(arguments: list[str] | None = None) -> None:
    found = run_on_one_thread(
        rows, arguments, description=__doc__, folder="certificate_cost", rounds=20
    )
    for model in MODELS:
        print(f"{model}: attribution takes {on_top(found, model):.2f} plain steps on top")


if __name__ == "__main__":
    main()
