"""Times an audit with label-free gradients against a plain training epoch, on scikit-learn's digits.

Run as ``python -m benchmarks.audit_cost``; ``--store`` keeps the rows, and ``--write docs/howto/audit.md``
writes the table of all stored rows. ``--samples 10000`` audits shifted, turned and scaled digits. Models are
the demo's convnet; one so narrow that the fixed costs of an audit dominate; one of twice the width; and an
MLP. An epoch loads with a `DataLoader` and steps with Adam, at the audit's batch size and at 64, the demo's
batch size. An audit is timed in three parts: the pass over the data, which computes two gradients of each
sample, the pass with the analysis of its rows, and a whole audit with its proof, the labels, tables and
pictures of the demo.

Epochs run in a process that only trains; audits run in one that keeps freed memory, as the command `pergrad
audit` does, and in one that does not, as `Audit.run` in a notebook. The processes take turns, so that a slow
phase of the machine affects all of them, and the fastest run of each counts: in CPU time on one thread, then
by the clock on two threads, for which nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.fastest import fastest_rows
from benchmarks.rows import RESULTS, Row, file_name, provenance, read, write
from benchmarks.table import settle
from pergrad.attribution import Samples, analyse
from pergrad.audit import AuditOptions, Spec, run_audit
from pergrad.audit.streaming.gradients import Gradients, joined_rows
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.streaming.memory import bytes_kept, fitting_batch_size, free_bytes
from pergrad.audit.streaming.stream import batches_in
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.cli.malloc import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mislabelled_digits as digits

_MARKERS = "<!-- audit-cost:start -->", "<!-- audit-cost:end -->"
_TRAINED_WITH = 64
Kind = Literal["training", "command", "notebook"]

_OF: dict[str, Kind] = {
    "plain": "training",
    "plain-64": "training",
    "pass": "command",
    "analysis": "command",
    "audit": "command",
    "audit-notebook": "notebook",
}
_BY_CLOCK = "plain", "plain-64", "audit"
_TITLES = {
    "plain": "a plain training epoch",
    "plain-64": "a plain training epoch, B=64",
    "pass": "the pass over the data",
    "analysis": "with the analysis",
    "audit": "all of `pergrad audit`",
    "audit-notebook": "all of `Audit.run`",
    "plain-clock": "a plain training epoch, two threads, by the clock",
    "plain-64-clock": "a plain training epoch, B=64, two threads, by the clock",
    "audit-clock": "all of `pergrad audit`, two threads, by the clock",
}


def narrow(seed: int) -> nn.Module:
    """Builds two convolutions of 16 and 32 channels, the second on 1/4 of the positions; no hidden layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 2 * 2, digits.CLASSES)),
        )


def wide(seed: int) -> nn.Module:
    """Builds the demo's convnet with twice the channels, and four times the hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(1, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(4, 128), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128 * 4 * 4, 512), nn.ReLU()),
            nn.Linear(512, digits.CLASSES),
        )


def mlp(seed: int) -> nn.Module:
    """Builds three linear layers of 1024 hidden units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU()),
            *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, digits.CLASSES)),
        )


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "demo": digits.convnet,
    "narrow": narrow,
    "wide": wide,
    "mlp": mlp,
}
_MODEL_TITLES = {
    "demo": "convnet of 32 and 64 channels",
    "narrow": "convnet of 16 and 32 channels",
    "wide": "convnet of 64 and 128 channels",
    "mlp": "MLP of 1024 units",
}


def more_digits(data: digits.Digits, samples: int, seed: int) -> digits.Digits:
    """Returns that many digits, shifted, turned and scaled at random; each differs from all others."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(samples) % len(data)
    turn, scale = (torch.randn(samples, generator=generator) for _ in range(2))
    turn, scale = 0.15 * turn, 1 + 0.08 * scale
    maps = torch.zeros(samples, 2, 3)
    maps[:, 0, 0], maps[:, 0, 1] = scale * turn.cos(), -scale * turn.sin()
    maps[:, 1, 0], maps[:, 1, 1] = scale * turn.sin(), scale * turn.cos()
    maps[:, :, 2] = 0.12 * torch.randn(samples, 2, generator=generator)
    grid = nn.functional.affine_grid(maps, [samples, 1, 8, 8], align_corners=False)
    images = nn.functional.grid_sample(data.images[rows], grid, align_corners=False)
    images = images + 0.03 * torch.randn(images.shape, generator=generator)
    return digits.Digits(images, data.given[rows], data.true[rows])


def trained_spec(model_name: str, seed: int, samples: int | None = None) -> Spec:
    """Returns digits with 5% of the labels flipped, and a model trained for a few epochs."""
    data = digits.digits_with_flips(0.05, seed)
    if samples is not None:
        data = more_digits(data, samples, seed)
    model = MODELS[model_name](seed)
    for _ in digits.training(model, data, epochs=3, seed=seed):
        pass
    return digits.spec_of(model, data)


def epoch(spec: Spec, model_name: str, batch_size: int) -> None:
    """Trains a copy of the model for one epoch; the audited model is unchanged."""
    model = MODELS[model_name](0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for x, y in DataLoader(spec.dataset, batch_size=batch_size, shuffle=True):
        optimizer.zero_grad()
        spec.loss(model, x, y).mean().backward()
        optimizer.step()


def passed(spec: Spec, gradients: Gradients, batch_size: int) -> Samples:
    """Computes the rows of all samples."""
    indices = np.arange(len(spec.dataset))
    loader = Loader(spec, indices, 0)
    pieces = batches_in([(0, len(indices))], batch_size)
    batches = loader.batches(pieces, workers=0)
    rows = joined_rows([gradients.rows(b.arguments, b.stop - b.start) for b in batches])
    groups = dict(zip(grouped_parameters(spec), rows.group_norms.T, strict=True))
    return Samples(
        *(indices, rows.loss, rows.norm, groups, rows.sketch),
        *(rows.free, rows.target, rows.predicted, rows.probability),
    )


def chosen_batch_size(spec: Spec) -> int:
    """Returns the batch size that an audit chooses."""
    x, y = next(iter(DataLoader(spec.dataset, batch_size=32)))
    kept = bytes_kept(spec.model, lambda: spec.loss(spec.model, x, y)) // len(x)
    free = free_bytes(torch.device("cpu"))
    return fitting_batch_size(kept, free, len(spec.dataset), on_cpu=True)


_STEPS: dict[str, Callable[[], object]] = {}  # of this process, by name


def prepare(
    kind: Kind, model_name: str, seed: int, samples: int | None, folder: str, sketch_dim: int
) -> None:
    """Makes the steps of a process; each audit writes to its own folder within `folder`."""
    torch.set_num_threads(1)
    spec = trained_spec(model_name, seed, samples)
    batch_size = chosen_batch_size(spec)
    if kind == "training":
        _STEPS["plain"] = lambda: epoch(spec, model_name, batch_size)
        _STEPS["plain-64"] = lambda: epoch(spec, model_name, _TRAINED_WITH)
        return
    if kind == "command":
        keep_freed_memory()
    gradients = Gradients(spec.model, spec, grouped_parameters(spec), sketch_dim=sketch_dim, seed=0)
    options = AuditOptions(sketch_dim=sketch_dim)
    folders = (Path(folder) / f"{kind}-{number}" for number in count())
    _STEPS["pass"] = lambda: passed(spec, gradients, batch_size)
    _STEPS["analysis"] = lambda: analyse(passed(spec, gradients, batch_size))
    _STEPS["audit"] = lambda: run_audit(spec, next(folders), options)


def timed(name: str, threads: int) -> float:
    """Runs a step of this process; returns its CPU time on one thread, or its time on several."""
    clock = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    start = clock()
    _STEPS[name]()
    taken = clock() - start
    torch.set_num_threads(1)
    return taken


def rows(
    sketch_dim: int, rounds: int, seed: int, model_name: str = "demo", samples: int | None = None
) -> list[Row]:
    """Returns a row per step; `ratio` is relative to the plain epoch at the audit's batch size."""
    made = provenance(torch.device("cpu"), of_commit=None, rounds=rounds, steps=1, seed=seed)
    spec = trained_spec(model_name, seed, samples)
    batch_size = chosen_batch_size(spec)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spawn = multiprocessing.get_context("spawn")
        arguments = model_name, seed, samples, folder, sketch_dim
        processes = {
            kind: stack.enter_context(ProcessPoolExecutor(1, spawn, prepare, (kind, *arguments)))
            for kind in dict.fromkeys(_OF.values())
        }

        def seconds_of(name: str, threads: int) -> float:
            step = name.removesuffix("-notebook")
            return processes[_OF[name]].submit(timed, step, threads).result()

        on_one = {name: (name, 1) for name in _OF}
        on_two = {f"{name}-clock": (name, 2) for name in _BY_CLOCK}
        seconds: dict[str, float] = {}
        for some in (on_one, on_two):
            for number in range(rounds + 1):
                for key, (name, threads) in some.items():
                    taken = seconds_of(name, threads)
                    if number > 0:  # the first is slower
                        seconds[key] = min(taken, seconds.get(key, taken))
    return fastest_rows(
        seconds,
        _TITLES,
        size="digits",
        model=f"digits-{model_name}",
        model_title=f"{_MODEL_TITLES[model_name]} on {len(spec.dataset)} digits, B={batch_size}",
        quantity="audit",
        note=f"the fastest; sketches of {sketch_dim}, label-free ones of {AuditOptions.free_dim}",
        provenance=made,
    )


_COLUMNS = {
    "pass": ("pass", "plain"),
    "`pergrad audit`": ("audit", "plain"),
    "`Audit.run`": ("audit-notebook", "plain"),
    "in epochs of B=64": ("audit", "plain-64"),
    "by the clock, two threads": ("audit-clock", "plain-clock"),
    "by the clock, B=64": ("audit-clock", "plain-64-clock"),
}


def markdown() -> str:
    """Returns the stored costs as a table: the newest rows of each model and number of samples."""
    newest: dict[str, list[Row]] = {}
    for path in sorted((RESULTS / "audit_cost").glob("*.jsonl")):
        found = read(path)
        newest[found[0].model_title] = found
    lines = ["| | " + " | ".join(_COLUMNS) + " |", "|---" * (len(_COLUMNS) + 1) + "|"]
    for title in sorted(newest):
        seconds = {row.method: row.fastest or 0.0 for row in newest[title]}
        ratios = [seconds[one] / seconds[other] for one, other in _COLUMNS.values()]
        lines.append(f"| {title} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--samples", type=int, help="made of the 1797 digits; default: these")
    parser.add_argument("--sketch-dim", type=int, default=AuditOptions.sketch_dim)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--write", type=Path, help="write the stored costs into this page alone")
    options = parser.parse_args(arguments)
    if options.write is not None:
        settle(markdown(), options.write, None, markers=_MARKERS, module="benchmarks.audit_cost")
        return
    torch.set_num_threads(1)
    found = rows(options.sketch_dim, options.rounds, options.seed, options.model, options.samples)
    base = {row.method: row.fastest or 0.0 for row in found}
    print(found[0].model_title)
    for row in found:
        print(f"{row.method_title:60} {base[row.method] * 1e3:7.1f} ms")
    for title, (one, other) in _COLUMNS.items():
        print(f"{title:30} {base[one] / base[other]:5.2f}")
    if options.store:
        part = f"{options.model}-{options.samples or 1797}"
        name = file_name("digits", "float32", found[0].provenance, part=part)
        path = RESULTS / "audit_cost" / name  # not for the README's table
        write(path, found)
        print(path.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
