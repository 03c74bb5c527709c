"""Prepares the steps of one model, which compiles them, and times them in rounds of random order."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import pergrad
from benchmarks import rows
from benchmarks.hugging_face.subjects import SUBJECTS, Batch, losses
from benchmarks.rows import Provenance, Row
from benchmarks.timing import orders

__all__ = ["Prepared", "check", "prepare", "timed"]

WARM_UP = 4  # recorded, compiled, and warm
PAUSE = 2.0  # seconds
_LONGEST_NOTE = 600
QUANTITIES: dict[str, Callable[[], pergrad.Quantity]] = {
    "norms": pergrad.Norms,
    "clipped": lambda: pergrad.ClippedSum(1.0),
    "grads": pergrad.Grads,
}
Step = Callable[[], Any]


def steps_of(
    model: nn.Module, batch: Batch, *, is_compiled: bool, context: Callable[[], Any]
) -> dict[str, tuple[str, Step]]:
    """Returns the steps by name, each with the quantity that it computes."""

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        with context():
            return losses(model, batch)

    def training(step: Callable[..., Tensor]) -> Step:
        def run() -> None:
            step(model, batch).sum().backward()
            model.zero_grad(set_to_none=True)

        return run

    def recorded(make: Callable[[], pergrad.Quantity]) -> Step:
        def run() -> Any:
            quantity = make()
            with pergrad.record(model, quantity):
                loss_fn(model, batch).sum().backward()
            return quantity

        return run

    def compiled(make: Callable[[], pergrad.Quantity]) -> Step:
        quantity = make()
        step = pergrad.compiled(model, loss_fn, quantity)

        def run() -> None:
            step(batch)
            quantity.reset()  # kept gradients would count in the memory of the other steps

        return run

    found: dict[str, tuple[str, Step]] = {"plain": ("training", training(loss_fn))}
    for name in ("norms", "clipped"):
        found[f"pergrad-{name}"] = name, recorded(QUANTITIES[name])
    if not is_compiled:
        return found
    found["plain-compiled"] = "training", training(torch.compile(loss_fn))
    for name, make in QUANTITIES.items():
        found[f"pergrad-{name}-compiled"] = name, compiled(make)
    return found


def check(model: nn.Module, batch: Batch) -> str:
    """Compares the norms of the first two samples with plain backward passes; returns the error, if any."""
    two = {name: t[:2] for name, t in batch.items()}
    found = pergrad.norms(model, losses, two)
    for n in range(2):
        one = {name: t[n : n + 1] for name, t in two.items()}
        trained = [p for p in model.parameters() if p.requires_grad]
        own = torch.autograd.grad(losses(model, one).sum(), trained, allow_unused=True)
        wanted = torch.stack([g.norm() for g in own if g is not None]).norm()
        if not torch.isclose(found[n], wanted, rtol=1e-3):
            return f"the norm of sample {n} is {found[n]:.6g} instead of {wanted:.6g}"
    return ""


@dataclass
class Prepared:
    """A model with its warm steps, and what was seen while they were made."""

    name: str
    size: str
    device: torch.device
    wrong: str
    steps: dict[str, tuple[str, Step]]
    notes: dict[str, str] = field(default_factory=dict)  # why a step failed, or is not compiled
    first: dict[str, float] = field(default_factory=dict)  # seconds of the first steps
    lacked_memory: set[str] = field(default_factory=set)

    def warm_up(self, method: str) -> None:
        """Runs the first steps of a method; what it cannot do is noted."""
        step = self.steps[method][1]
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(WARM_UP):
                    step()
                    if self.device.type == "cuda":
                        torch.cuda.empty_cache()  # other models are prepared beside this one
            failed = [str(w.message) for w in told if "pergrad.compiled" in str(w.message)]
            self.notes[method] = failed[0] if failed else ""
            self.first[method] = time.perf_counter() - started
            self.lacked_memory.discard(method)
        except Exception as error:
            words = " ".join(str(error).split())
            self.notes[method] = f"{type(error).__name__}: {words}"[:_LONGEST_NOTE]
            # A compiler that runs out of memory raises an error of its own.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in words:
                self.lacked_memory.add(method)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def prepare(
    name: str,
    size: str,
    device: torch.device,
    *,
    is_compiled: bool,
    budget: float = float("inf"),
    tries: int = 1,
) -> Prepared:
    """Builds the model and runs the first steps of each method; none begins after `budget` seconds.

    A method that runs out of memory is tried again, `tries` times in all.
    """
    started = time.monotonic()
    subject = SUBJECTS[name]
    with torch.device(device):
        model = subject.build(size)
    batch = subject.batch(size, model)
    wrong = check(model, {n: t[:2] for n, t in batch.items()}) if size == "cpu" else ""
    batch = {name: t.to(device) for name, t in batch.items()}

    def context() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

    steps = steps_of(model, batch, is_compiled=is_compiled, context=context)
    made = Prepared(name, size, device, wrong, steps)
    for method in steps:
        for _ in range(tries):
            if time.monotonic() - started > budget:
                made.notes[method] = f"not tried: the others took {budget:.0f} seconds"
                break
            made.warm_up(method)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if method not in made.lacked_memory:
                break
            time.sleep(PAUSE)  # until another model's step has returned its memory
    return made


def _peak(step: Step, device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _kernels(step: Step, device: torch.device) -> dict[str, tuple[float, int]]:
    """Returns the seconds that each kernel of one step takes on the GPU, and its calls, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize(device)
    taken = {e.key: (e.self_device_time_total / 1e6, e.count) for e in profiler.key_averages()}
    return dict(sorted(taken.items(), key=lambda item: -item[1][0]))


def timed(made: Prepared, rounds: int, provenance: Provenance, shown: int = 0) -> list[Row]:
    """Times all steps of a model in rounds of random order.

    On a GPU the steps of a visit run without waiting for each other, as in training; the `shown` kernels that
    take longest are printed.
    """
    is_gpu = made.device.type == "cuda"
    clock = time.perf_counter if is_gpu else time.thread_time
    repeated = 4 if is_gpu else 1
    for method in sorted(made.lacked_memory):  # another model had it then
        made.warm_up(method)
    taken: dict[str, list[float]] = {method: [] for method in made.first}
    peaks = {m: _peak(made.steps[m][1], made.device) for m in taken} if is_gpu else {}
    kernels = {m: _kernels(made.steps[m][1], made.device) for m in taken} if is_gpu else {}
    for order in orders(list(taken), rounds=rounds, seed=0):
        for method in order:
            step = made.steps[method][1]
            step()
            made.wait()
            start = clock()
            for _ in range(repeated):
                step()
            made.wait()
            taken[method].append((clock() - start) / repeated)
    for method, each in kernels.items():
        total, calls = (sum(column) for column in zip(*each.values(), strict=True))
        print(f"{made.name} {method} {total * 1e3:8.3f} ms {calls:4} calls", flush=True)
        for kernel, (seconds, calls) in [*each.items()][:shown]:
            shown_as = f"{seconds * 1e3:8.3f} ms {calls:4}x {kernel[:110]}"
            print(f"{made.name} {method} {shown_as}", flush=True)
    found = []
    for method, (quantity, _) in made.steps.items():
        times = taken.get(method)
        base = "plain-compiled" if method.endswith("compiled") else "plain"
        ratios = [a / b for a, b in zip(times or (), taken.get(base, ()), strict=False)]
        status: rows.Status = "wrong" if made.wrong else "ok" if ratios else "failed"
        found.append(
            Row(
                size=made.size,
                precision="bfloat16" if is_gpu else "float32",
                model=made.name,
                model_title=SUBJECTS[made.name].title_at(made.size),
                method=method,
                method_title=method,
                quantity=quantity,
                status=status,
                note=made.wrong or made.notes[method],
                seconds=statistics.median(times) if times else None,
                seconds_iqr=None,
                fastest=min(times) if times else None,
                ratio=statistics.median(ratios) if ratios else None,
                ratio_iqr=None,
                peak_bytes=peaks.get(method),
                memory_ratio=peaks[method] / peaks[base]
                if method in peaks and base in peaks
                else None,
                provenance=provenance,
                first_seconds=made.first.get(method),
                device_seconds=sum(s for s, _ in kernels[method].values())
                if method in kernels
                else None,
            )
        )
    return found
