"""Times every method on every model in one process and stores a row per result.

``python -m benchmarks.run --size cpu`` prints a table of ratios to plain training for each quantity,
``--quantity norms`` that of one. A method is first compared with a loop over the samples; a wrong one
is shown as WRONG and not timed, a failing one as failing with its error, and one whose package is
missing is left out with a note. A run of all models and of all methods to its quantities is stored
under benchmarks/results/; any other only where ``--output`` names a file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks import rows, table
from benchmarks.arguments import add_run_arguments, parsed_run
from benchmarks.check import disagreement
from benchmarks.memory import step_peak_bytes
from benchmarks.methods import BASES, METHODS, TITLES, Method, Quantity, Step, clear
from benchmarks.models import MODELS, Size, Task, build
from benchmarks.precision import PRECISIONS
from benchmarks.timing import middle, orders, settled_heap, visit

EXACT = 1e-6  # relative, in float64: far over rounding, far under any mistake
CHECKED = 32  # samples in float64; ExpandedWeights takes another path below 32 than from there on


@dataclass(frozen=True)
class Setting:
    """What is the same for all pairs of a run."""

    size: Size
    precision: str
    device: torch.device
    seed: int

    def task(self, model: str) -> Task:
        return build(model, self.size, seed=self.seed, device=self.device)

    def step(self, method: Method, task: Task) -> Step:
        """The method's step with the run's precision around it."""
        inner, context = method.prepare(task), PRECISIONS[self.precision].context

        def step() -> dict[str, Tensor]:
            with context(self.device):
                return inner()

        return step


@dataclass
class Entry:
    """One (model, method) on its way through the run."""

    model: str
    method: Method
    status: rows.Status = "ok"
    note: str = ""
    peak: int | None = None
    visits: dict[int, list[float]] = field(default_factory=dict)  # round -> seconds
    step: Step | None = None
    clear: Callable[[], None] = lambda: None

    def stop(self, status: rows.Status, note: str) -> None:
        self.status, self.note, self.step, self.clear = status, note, None, lambda: None

    def seconds(self, number: int) -> float:
        return statistics.median(self.visits[number])


def first_line(error: Exception) -> str:
    """The error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def check(entry: Entry, setting: Setting) -> str | None:
    """What is wrong with the method on this model, if anything: exactly, then as it is timed."""
    exact = setting.task(entry.model).double().head(CHECKED)
    got = entry.method.prepare(exact)()
    fresh = setting.task(entry.model).double().head(CHECKED)
    quantity = entry.method.quantity
    wrong = disagreement(fresh, quantity, got, tolerance=EXACT, samples=4)
    del got, exact, fresh
    if wrong is not None:
        return f"{wrong} (float64)"
    task = setting.task(entry.model)
    precision = PRECISIONS[setting.precision]
    got = setting.step(entry.method, task)()
    wrong = disagreement(
        setting.task(entry.model), quantity, got, tolerance=precision.tolerance, samples=4
    )
    return None if wrong is None else f"{wrong} ({setting.precision})"


def prepare(entry: Entry, setting: Setting) -> None:
    """Check the method, count its memory, and leave it ready to be timed or stopped."""
    missing = entry.method.missing()
    if missing is not None:
        entry.stop("skipped", missing)
        return
    try:
        wrong = check(entry, setting)
        if wrong is not None:
            entry.stop("wrong", wrong)
            return
        task = setting.task(entry.model)
        step = setting.step(entry.method, task)
        step()
        clear(task.model)
        entry.peak = task.resident_bytes() + step_peak_bytes(step, setting.device)
        clear(task.model)
    except Exception as error:  # a peer may fail in any way; it is shown, not hidden
        entry.stop("failed", first_line(error))
        return
    entry.step, entry.clear = step, lambda: clear(task.model)


def measure(
    models: list[str], methods: list[str], setting: Setting, *, rounds: int, steps: int
) -> list[Entry]:
    """Check, then time all pairs."""
    pairs = [(model, method) for model in models for method in methods]
    entries = {pair: Entry(pair[0], METHODS[pair[1]]) for pair in pairs}
    progress = Progress()
    for (model, method), entry in entries.items():
        progress.at("checks", model, method)
        prepare(entry, setting)
    with settled_heap():
        visits = orders(models, methods, rounds=rounds, seed=setting.seed)
        for number, model, method in visits:
            entry = entries[model, method]
            if entry.step is None:
                continue
            progress.at(f"round {number + 1}/{rounds}", model, method)
            try:
                entry.visits[number] = visit(
                    entry.step, entry.clear, steps=steps, device=setting.device
                )
            except Exception as error:
                entry.stop("failed", first_line(error))
    progress.end()
    return list(entries.values())


def result(entry: Entry, base: Entry, setting: Setting, provenance: rows.Provenance) -> rows.Row:
    """The row of one pair; `base` is plain training on the same model."""
    good = entry.status == "ok"
    seconds = middle([entry.seconds(n) for n in entry.visits]) if good else (None, None)
    ratios: tuple[float | None, tuple[float, float] | None] = (None, None)
    if good and base.status == "ok":
        ratios = middle([entry.seconds(n) / base.seconds(n) for n in entry.visits])
    memory = entry.peak / base.peak if good and entry.peak and base.peak else None
    return rows.Row(
        size=setting.size,
        precision=setting.precision,
        model=entry.model,
        model_title=MODELS[entry.model][setting.size].title,
        method=entry.method.name,
        method_title=entry.method.title,
        quantity=entry.method.quantity,
        status=entry.status,
        note=entry.note,
        seconds=seconds[0],
        seconds_iqr=seconds[1],
        fastest=min(t for times in entry.visits.values() for t in times) if good else None,
        ratio=ratios[0],
        ratio_iqr=ratios[1],
        peak_bytes=entry.peak if good else None,
        memory_ratio=memory,
        provenance=provenance,
    )


class Progress:
    """One line on a terminal, replaced at each step; elsewhere a line where a stage begins."""

    def __init__(self) -> None:
        self.stage = ""

    def at(self, stage: str, model: str, method: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{stage}: {model}, {method}", end="", file=sys.stderr, flush=True)
        elif stage != self.stage:
            print(stage, file=sys.stderr, flush=True)
        self.stage = stage

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def methods_of(quantities: list[Quantity], *, is_compiled: bool) -> list[str]:
    """The methods to those quantities, and those that every table shows."""
    return [
        method.name
        for quantity in (*BASES, *quantities)
        for method in METHODS.values()
        if method.quantity == quantity and method.compiled <= is_compiled
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quantity", nargs="+", choices=TITLES, default=list(TITLES))
    chosen.add_argument("--methods", nargs="+", choices=METHODS, help="these alone, beside plain")
    parser.add_argument("--compiled", action="store_true", help="torch.compile too: takes minutes")
    parser.add_argument("--size", choices=["tiny", "cpu", "gpu"], default="cpu")
    add_run_arguments(parser, rounds=15, steps=3)
    options = parsed_run(parser, arguments)
    options.full = set(options.models) == set(MODELS) and options.methods is None
    if options.methods is None:
        options.methods = methods_of(options.quantity, is_compiled=options.compiled)
    for name in options.methods:
        if METHODS[name].compiled and not options.compiled:
            parser.error(f"--methods {name} needs --compiled")
    if "plain" not in options.methods:
        options.methods.insert(0, "plain")  # the base of every ratio
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run, print the table, store the rows."""
    options = parse(arguments)
    device, precision = options.device, options.precision
    setting = Setting(options.size, precision, device, options.seed)
    provenance = rows.provenance(
        device,
        of_commit=options.commit,
        rounds=options.rounds,
        steps=options.steps,
        seed=options.seed,
    )
    entries = measure(
        options.models, options.methods, setting, rounds=options.rounds, steps=options.steps
    )
    bases = {entry.model: entry for entry in entries if entry.method.name == "plain"}
    results = [result(entry, bases[entry.model], setting, provenance) for entry in entries]
    path = options.output
    if path is None and options.full and options.size != "tiny":
        part = "-".join(options.quantity) if len(options.quantity) < len(TITLES) else ""
        path = rows.RESULTS / rows.file_name(options.size, precision, provenance, part=part)
    if path is not None:
        rows.write(path, results)
    print("\n\n".join(table.render(one) for one in table.tables([("", results)])))
    print(table.spread(results))
    if path is not None:
        print(f"stored {len(results)} rows in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
