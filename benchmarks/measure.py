"""Measures a method on a model: compares it with the loop, counts its memory, times it in rounds."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.check import disagreement
from benchmarks.memory import step_peak_bytes
from benchmarks.methods import BASES, METHODS, Method, SelfCounted, Step, clear
from benchmarks.models import MODELS, Size, Task, build
from benchmarks.precision import PRECISIONS
from benchmarks.timing import middle, orders, settled_heap, visit
from benchmarks.turns import Turns

EXACT = 1e-6  # relative error in float64: far above rounding, far below any mistake
CHECKED = 32  # samples in float64; ExpandedWeights takes another path below 32 samples
PREPARATION = 0.75  # share of the time for a model; the rest is for the rounds


@dataclass(frozen=True)
class Setting:
    """Settings of a run that all (model, method) pairs share."""

    size: Size
    precision: str
    device: torch.device
    seed: int
    checks: rows.Checks = "exact"

    def task(self, model: str) -> Task:
        return build(model, self.size, seed=self.seed, device=self.device)

    def exact_task(self, entry: Entry) -> Task:
        """Returns the task in float64; the tiny one for a compiled method, to save compile time."""
        size: Size = "tiny" if entry.method.compiled else self.size
        return build(entry.model, size, seed=self.seed, device=self.device).double().head(CHECKED)


def prepared(method: Method, task: Task, precision: str) -> tuple[Step, int | None]:
    """Returns the method's step within the precision, and its own memory count if it has one."""
    device, context = task.inputs.device, PRECISIONS[precision].context
    with context(device):
        inner = method.prepare(task)

    def step() -> dict[str, Tensor]:
        with context(device):
            return inner()

    return step, inner.peak_bytes if isinstance(inner, SelfCounted) else None


@dataclass
class Entry:
    """State of one (model, method) pair during a run."""

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

    @property
    def is_settled(self) -> bool:
        """Returns whether there is a row to store: figures, or the reason for their absence."""
        return self.status != "ok" or len(self.visits) > 0


def first_line(error: Exception) -> str:
    """Returns the error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def exactness(entry: Entry, setting: Setting) -> str | None:
    """Returns the method's error in float64, if any."""
    got = entry.method.prepare(setting.exact_task(entry))()
    fresh = setting.exact_task(entry)
    wrong = disagreement(fresh, entry.method.quantity, got, tolerance=EXACT, samples=4)
    return None if wrong is None else f"{wrong} (float64)"


def agreement(entry: Entry, setting: Setting, got: dict[str, Tensor]) -> str | None:
    """Returns the error of results at the timed precision, if any."""
    tolerance = PRECISIONS[setting.precision].tolerance
    fresh = setting.task(entry.model)
    wrong = disagreement(fresh, entry.method.quantity, got, tolerance=tolerance, samples=4)
    return None if wrong is None else f"{wrong} ({setting.precision})"


def check(entry: Entry, setting: Setting) -> str | None:
    """Returns the method's error on this model, if any: first in float64, then at the timed precision."""
    step, _ = prepared(entry.method, setting.task(entry.model), setting.precision)
    return exactness(entry, setting) or agreement(entry, setting, step())


def prepare(entry: Entry, setting: Setting) -> None:
    """Checks the method and counts its memory; leaves it ready for timing, or stopped."""
    missing = entry.method.missing(setting.device)
    if missing is not None:
        entry.stop("skipped", missing)
        return
    try:
        wrong = exactness(entry, setting) if setting.checks == "exact" else None
        if wrong is None:
            task = setting.task(entry.model)
            step, counted = prepared(entry.method, task, setting.precision)
            wrong = agreement(entry, setting, step())  # checks the step that is timed
            clear(task.model)
        if wrong is not None:
            entry.stop("wrong", wrong)
            return
        if counted is None and not entry.method.graphs:
            counted = task.resident_bytes() + step_peak_bytes(step, setting.device)
        entry.peak = counted
        clear(task.model)
    except Exception as error:  # a peer may fail in any way; the table shows its error
        entry.stop("failed", first_line(error))
        return
    entry.step, entry.clear = step, lambda: clear(task.model)


def measure(
    model: str,
    methods: list[str],
    setting: Setting,
    *,
    rounds: int,
    steps: int,
    seconds: float | None = None,
    turns: Turns | None = None,
) -> Iterator[list[Entry]]:
    """Checks all methods on the model, then times them; yields the results after each round.

    After three quarters of `seconds` it prepares no further method, and after `seconds` it starts no further
    round. Plain training and one round always run.
    """
    entries = {name: Entry(model, METHODS[name]) for name in methods}
    turns = turns or Turns(None)
    begin = time.monotonic()
    with turns.preparing():
        for name in sorted(methods, key=_urgency):
            entry, start = entries[name], time.monotonic()
            if seconds is not None and name != "plain" and start - begin > PREPARATION * seconds:
                entry.stop("skipped", f"past the time for {model}, {seconds:.0f} s")
                continue
            prepare(entry, setting)
            if setting.device.type == "cuda":  # other runs use the GPU to prepare
                torch.cuda.empty_cache()
            said = entry.status if entry.status == "ok" else f"{entry.status}: {entry.note}"
            progress(f"{model}, {name}: {said} ({time.monotonic() - start:.1f} s)")
    try:
        with turns.timing(), settled_heap():
            for number, names in enumerate(orders(methods, rounds=rounds, seed=setting.seed)):
                if number > 0 and seconds is not None and time.monotonic() - begin > seconds:
                    progress(f"{model}: {number} of {rounds} rounds in {seconds:.0f} s")
                    break
                _round(number, [entries[name] for name in names], steps, setting.device)
                progress(f"{model}: round {number + 1} of {rounds}")
                yield list(entries.values())
    finally:
        for entry in entries.values():  # otherwise the models of all methods stay alive
            entry.step, entry.clear = None, lambda: None
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def _urgency(name: str) -> tuple[bool, bool, bool]:
    """Returns the sort key for preparation: peers that compile slowly come last, and are dropped first."""
    method = METHODS[name]
    is_base, is_own = method.quantity in BASES, method.requires == "pergrad"
    return (name != "plain", not (is_base or is_own), method.compiled)


def _round(number: int, entries: list[Entry], steps: int, device: torch.device) -> None:
    for entry in entries:
        if entry.step is None:
            continue
        try:
            entry.visits[number] = visit(entry.step, entry.clear, steps=steps, device=device)
        except Exception as error:
            entry.stop("failed", first_line(error))


def progress(text: str) -> None:
    """Prints a progress line on stderr."""
    print(text, file=sys.stderr, flush=True)


def result(entry: Entry, base: Entry, setting: Setting, provenance: rows.Provenance) -> rows.Row:
    """Returns the row of one pair; `base` is plain training on the same model."""
    good = entry.status == "ok"
    seconds = middle([entry.seconds(n) for n in entry.visits]) if good else (None, None)
    ratios: tuple[float | None, tuple[float, float] | None] = (None, None)
    shared = [n for n in entry.visits if n in base.visits]
    if good and base.status == "ok" and shared:
        ratios = middle([entry.seconds(n) / base.seconds(n) for n in shared])
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
        provenance=replace(provenance, rounds=max(1, len(base.visits))),
    )


def results(entries: list[Entry], setting: Setting, provenance: rows.Provenance) -> list[rows.Row]:
    """Returns the rows of one model that are known so far."""
    (base,) = (entry for entry in entries if entry.method.name == "plain")
    settled = [entry for entry in entries if entry.is_settled]
    return [result(entry, base, setting, provenance) for entry in settled]
