"""Measures time and peak memory of a step against batch size, sequence length and width of the transformer.

``python -m benchmarks.scaling --size cpu`` varies one of them at a time from small to large, prints the
results and stores them under benchmarks/results/scaling/; ``python -m benchmarks.plot`` draws them.
``--axes`` varies only some; the others are drawn from an earlier run. If a quantity does not fit into memory,
larger points on that axis are skipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks import rows
from benchmarks.arguments import add_run_arguments, parsed_run
from benchmarks.measure import first_line, prepared
from benchmarks.memory import step_peak_bytes
from benchmarks.methods import METHODS, Step, clear
from benchmarks.models import Task, drawn_on, transformer
from benchmarks.timing import orders, settled_heap, visit

RESULTS = rows.RESULTS / "scaling"

QUANTITIES = {  # by the method that is timed
    "plain": "plain",
    "grads": "pergrad-record",
    "norms": "pergrad-norms",
    "clipped": "pergrad-clipped",
}
TITLES = {
    "plain": "plain training",
    "grads": "full gradients",
    "norms": "norms",
    "clipped": "clipped sum",
}
AXES = {"batch": "batch size", "length": "sequence length", "width": "width"}


@dataclass(frozen=True)
class Shape:
    """One transformer and its batch; heads have 64 channels each if the width allows."""

    batch: int
    length: int
    width: int
    depth: int
    vocabulary: int

    def task(self, *, seed: int, device: torch.device) -> Task:
        with drawn_on(device, seed):
            return transformer(
                self.batch,
                self.length,
                vocabulary=self.vocabulary,
                width=self.width,
                depth=self.depth,
                heads=max(1, self.width // 64),
            )


@dataclass(frozen=True)
class Sweep:
    """A base shape, and the values of the one size that varies."""

    base: Shape
    values: dict[str, list[int]]


SWEEPS: dict[str, Sweep] = {
    "tiny": Sweep(Shape(2, 4, 8, 1, 11), {"batch": [1, 2], "length": [2, 4], "width": [4, 8]}),
    "cpu": Sweep(
        Shape(8, 64, 128, 4, 1024),
        {
            "batch": [1, 2, 4, 8, 16, 32],
            "length": [16, 32, 64, 128, 256, 512],
            "width": [64, 128, 256, 512],
        },
    ),
    "gpu": Sweep(
        Shape(16, 512, 768, 12, 50257),
        {
            "batch": [1, 2, 4, 8, 16, 32, 64, 128, 256],
            "length": [64, 128, 256, 512, 1024, 2048, 4096],
            "width": [192, 384, 768, 1536, 3072],
        },
    ),
}


@dataclass(frozen=True)
class Point:
    """One quantity at one value on one axis; figures are None unless `status` is "ok"."""

    size: str
    precision: str
    axis: str
    value: int
    shape: Shape
    quantity: str
    status: Literal["ok", "failed", "skipped"]
    note: str
    seconds: float | None
    peak_bytes: int | None
    provenance: rows.Provenance


@dataclass
class _Run:
    """State of one quantity of one shape during its measurement."""

    status: Literal["ok", "failed", "skipped"] = "ok"
    note: str = ""
    peak: int | None = None
    times: list[float] | None = None
    step: Step | None = None
    clear: Callable[[], None] = lambda: None

    def fail(self, error: Exception) -> None:
        self.status, self.note, self.step = "failed", first_line(error), None
        self.peak, self.clear = None, lambda: None


def _prepare(run: _Run, quantity: str, make: Callable[[], Task], precision: str) -> None:
    method = METHODS[QUANTITIES[quantity]]
    try:
        task = make()
        missing = method.missing(task.inputs.device)
        if missing is not None:
            run.status, run.note = "skipped", missing
            return
        step, _ = prepared(method, task, precision)
        step()  # warm-up: one-time allocations do not count
        clear(task.model)
        run.peak = task.resident_bytes() + step_peak_bytes(step, task.inputs.device)
        clear(task.model)
        run.step, run.clear = step, lambda: clear(task.model)
    except Exception as error:  # usually out of memory
        run.fail(error)


def measure(
    shape: Shape,
    quantities: list[str],
    precision: str,
    device: torch.device,
    plan: rows.Provenance,
) -> dict[str, _Run]:
    """Measures all quantities of one shape, interleaved in random order."""
    runs = {quantity: _Run() for quantity in quantities}
    if not runs:
        return runs
    try:
        drawn = shape.task(seed=plan.seed, device=device)
    except Exception as error:  # the model alone may be too large
        for run in runs.values():
            run.fail(error)
        return runs
    for quantity, run in runs.items():
        _prepare(run, quantity, lambda: replace(drawn, model=copy.deepcopy(drawn.model)), precision)
    for order in orders(quantities, rounds=plan.rounds, seed=plan.seed):
        for run in (runs[quantity] for quantity in order):
            if run.step is None:
                continue
            try:
                times = visit(run.step, run.clear, steps=plan.steps, device=device)
                run.times = [*(run.times or []), statistics.median(times)]
            except Exception as error:
                run.fail(error)
    for run in runs.values():
        run.step, run.clear = None, lambda: None
    return runs


def sweep(
    size: str,
    precision: str,
    device: torch.device,
    provenance: rows.Provenance,
    *,
    axes: list[str],
    budget: float,
) -> Iterator[list[Point]]:
    """Yields the points so far after each value, from small to large on each axis.

    Skips points after the budget in seconds.
    """
    chosen = SWEEPS[size]
    points: list[Point] = []
    end = time.monotonic() + budget
    for axis in axes:
        stopped: dict[str, str] = {}  # quantity -> reason
        for value in chosen.values[axis]:
            shape = replace(chosen.base, **{axis: value})
            if time.monotonic() > end:
                stopped = dict.fromkeys(QUANTITIES, f"past the budget of {budget:.0f} s")
            tried = [quantity for quantity in QUANTITIES if quantity not in stopped]
            with settled_heap():
                runs = measure(shape, tried, precision, device, provenance)
            for quantity in QUANTITIES:
                run = runs.get(quantity) or _Run("skipped", stopped[quantity])
                if run.status != "ok":
                    stopped.setdefault(quantity, f"{axis} {value}: {run.note}")
                good = run.status == "ok" and run.times is not None
                points.append(
                    Point(
                        size=size,
                        precision=precision,
                        axis=axis,
                        value=value,
                        shape=shape,
                        quantity=quantity,
                        status=run.status,
                        note=run.note,
                        seconds=statistics.median(run.times) if good and run.times else None,
                        peak_bytes=run.peak if good else None,
                        provenance=provenance,
                    )
                )
            print(line(points[-len(QUANTITIES) :]), flush=True)
            yield points


def line(points: list[Point]) -> str:
    """Formats one value of an axis: plain's time and memory, and the ratios to them."""
    by = {point.quantity: point for point in points}
    first, cells = points[0], []
    base = by["plain"]
    for quantity, point in by.items():
        if point.seconds is None or point.peak_bytes is None:
            cells.append(f"{quantity} {point.status}")
        elif quantity == "plain" or base.seconds is None or base.peak_bytes is None:
            cells.append(f"{quantity} {1e3 * point.seconds:.1f} ms {point.peak_bytes / 1e6:.0f} MB")
        else:
            ratios = point.seconds / base.seconds, point.peak_bytes / base.peak_bytes
            cells.append("{} {:.2f} ({:.2f})".format(quantity, *ratios))
    return f"{first.axis:>6} {first.value:>5}: " + ", ".join(cells)


def read(path: Path) -> list[Point]:
    """Reads the points of one stored run."""
    points = []
    for text in path.read_text().splitlines():
        found = json.loads(text)
        unknown = found.keys() ^ {field.name for field in fields(Point)}
        if unknown:
            raise ValueError(f"{path.name}: fields {sorted(unknown)} do not match this benchmark's")
        found["shape"] = Shape(**found["shape"])
        found["provenance"] = rows.Provenance(**found["provenance"])
        points.append(Point(**found))
    return points


def newest(folder: Path) -> list[list[Point]]:
    """Returns all axes of each size and precision, each from the newest run that measured it."""
    latest: dict[tuple[str, str], dict[str, list[Point]]] = defaultdict(dict)
    runs = [read(path) for path in folder.glob("*.jsonl")]
    for points in sorted(runs, key=lambda points: points[0].provenance.date):
        for axis in AXES:
            own = [point for point in points if point.axis == axis]
            if any(point.status == "ok" for point in own):
                latest[points[0].size, points[0].precision][axis] = own
    return [
        [point for axis in AXES for point in latest[key].get(axis, [])] for key in sorted(latest)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Runs the sweep, prints and stores it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--size", choices=SWEEPS, default="cpu")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), help="in this order")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for all points")
    add_run_arguments(parser, rounds=3, steps=1, gpu_rounds=3, gpu_steps=4)
    options = parsed_run(parser, arguments)
    device, precision = options.device, options.precision
    provenance = rows.provenance(
        device,
        of_commit=options.commit,
        rounds=options.rounds,
        steps=options.steps,
        seed=options.seed,
    )
    path = options.output
    if path is None and options.size != "tiny":
        path = RESULTS / rows.file_name(options.size, precision, provenance)
    points: list[Point] = []
    steps = sweep(
        options.size, precision, device, provenance, axes=options.axes, budget=options.budget
    )
    for points in steps:
        if path is not None:
            rows.update(path, points)  # after each value: a stopped run keeps its points
    if path is not None:
        print(f"stored {len(points)} points in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
