"""Times an audit with label-free gradients against a plain training epoch, on scikit-learn's digits.

Run as ``python -m benchmarks.audit_cost``; ``--store`` keeps the rows, and ``--write docs/howto/audit.md``
writes the table of all stored rows. ``--samples 10000`` audits shifted, turned and scaled digits. Models are
the demo's convnet; one so narrow that the fixed costs of an audit dominate; one of twice the width; and an
MLP. Epochs and audits alternate, so that a slow phase of the machine affects all of them; the fastest of each
counts, in CPU time of this process. An epoch loads with a `DataLoader` and steps with Adam, at the audit's
batch size and at 64, the demo's batch size. An audit is timed in three parts: the pass over the data, which
computes two gradients of each sample, the pass with the analysis of its rows, and a whole audit with its
proof, the labels, tables and pictures of the demo.

From the first audit on, a process keeps the memory that a batch frees, which speeds up epochs too, by a third
at 1024 samples. So some epochs are timed before the first audit, as in training, and some alternate with
audits; ratios are relative to the latter. At last epochs and audits alternate on two threads, timed by the
clock: nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.fastest import fastest, fastest_rows
from benchmarks.rows import RESULTS, Row, file_name, provenance, read, write
from benchmarks.table import settle
from pergrad.attribution import Samples, analyse
from pergrad.audit import AuditOptions, Spec, run_audit
from pergrad.audit.streaming.gradients import Gradients, joined_rows
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.streaming.stream import batches_in
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.cli.malloc import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mislabelled_digits as digits

_MARKERS = "<!-- audit-cost:start -->", "<!-- audit-cost:end -->"
_TRAINED_WITH = 64
_TITLES = {
    "plain": "a plain training epoch",
    "plain-64": "a plain training epoch, B=64",
    "plain-before": "a plain training epoch, before the first audit",
    "pass": "the pass over the data",
    "analysis": "with the analysis",
    "audit": "all of an audit",
    "plain-clock": "a plain training epoch, two threads, by the clock",
    "audit-clock": "all of an audit, two threads, by the clock",
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


def steps(
    spec: Spec, model_name: str, folder: Path, batch_size: int, sketch_dim: int
) -> dict[str, Callable[[], object]]:
    """Returns the timed functions by name; each audit writes to its own folder within `folder`."""
    keep_freed_memory()  # as the command `pergrad audit` does
    gradients = Gradients(spec.model, spec, grouped_parameters(spec), sketch_dim=sketch_dim, seed=0)
    options = AuditOptions(batch_size=batch_size, sketch_dim=sketch_dim)
    folders = (folder / str(number) for number in count())

    return {
        "plain": lambda: epoch(spec, model_name, batch_size),
        "plain-64": lambda: epoch(spec, model_name, _TRAINED_WITH),
        "pass": lambda: passed(spec, gradients, batch_size),
        "analysis": lambda: analyse(passed(spec, gradients, batch_size)),
        "audit": lambda: run_audit(spec, next(folders), options),
    }


@contextmanager
def on_two_threads() -> Iterator[None]:
    """Runs the block with two threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rows(
    batch_size: int,
    sketch_dim: int,
    rounds: int,
    seed: int,
    model_name: str = "demo",
    samples: int | None = None,
) -> list[Row]:
    """Returns a row per timed function; `ratio` is relative to the plain epoch at the same batch size."""
    made = provenance(torch.device("cpu"), of_commit=None, rounds=rounds, steps=1, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        spec = trained_spec(model_name, seed, samples)
        before = {"plain-before": lambda: epoch(spec, model_name, batch_size)}
        seconds = fastest(before, rounds, warm_up=1, clock=time.process_time)
        timed = steps(spec, model_name, Path(folder), batch_size, sketch_dim)
        seconds |= fastest(timed, rounds, warm_up=1, clock=time.process_time)
        by_clock = {f"{name}-clock": timed[name] for name in ("plain", "audit")}
        with on_two_threads():
            seconds |= fastest(by_clock, rounds, warm_up=1, clock=time.perf_counter)
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


def markdown() -> str:
    """Returns the stored costs as a table: the newest rows of each model and number of samples."""
    newest: dict[str, list[Row]] = {}
    for path in sorted((RESULTS / "audit_cost").glob("*.jsonl")):
        found = read(path)
        newest[found[0].model_title] = found
    lines = [
        "| | pass | audit | in a fresh process | in epochs of B=64 | by the clock, two threads |",
        "|---|---|---|---|---|---|",
    ]
    for title in sorted(newest):
        seconds = {row.method: row.fastest or 0.0 for row in newest[title]}
        pairs = [
            ("pass", "plain"),
            *(("audit", name) for name in ("plain", "plain-before", "plain-64")),
        ]
        parts = [f"{seconds[one] / seconds[other]:.2f}" for one, other in pairs]
        # Rows of earlier commits were not timed by the clock.
        has_clock = "audit-clock" in seconds
        parts.append(f"{seconds['audit-clock'] / seconds['plain-clock']:.2f}" if has_clock else "–")
        lines.append(f"| {title} | {' | '.join(parts)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--samples", type=int, help="made of the 1797 digits; default: these")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--sketch-dim", type=int, default=AuditOptions.sketch_dim)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--write", type=Path, help="write the stored costs into this page alone")
    options = parser.parse_args(arguments)
    if options.write is not None:
        settle(markdown(), options.write, None, markers=_MARKERS, module="benchmarks.audit_cost")
        return
    torch.set_num_threads(options.threads)
    found = rows(
        *(options.batch_size, options.sketch_dim, options.rounds, options.seed),
        *(options.model, options.samples),
    )
    base = {row.method: row.fastest or 0.0 for row in found}
    print(found[0].model_title)
    for row in found[:-2]:
        taken = base[row.method]
        print(
            f"{row.method_title:50} {taken * 1e3:7.1f} ms  {row.ratio:5.2f}x"
            f"  {taken / base['plain-before']:5.2f}x of one before"
            f"  {taken / base['plain-64']:5.2f}x of one at {_TRAINED_WITH}"
        )
    ratio = base["audit-clock"] / base["plain-clock"]
    print(f"{found[-1].method_title:50} {base['audit-clock'] * 1e3:7.1f} ms  {ratio:5.2f}x")
    if options.store:
        part = "-".join(map(str, (options.model, options.samples or 1797, options.batch_size)))
        name = file_name("digits", "float32", found[0].provenance, part=part)
        path = RESULTS / "audit_cost" / name  # not for the README's table
        write(path, found)
        print(path.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
