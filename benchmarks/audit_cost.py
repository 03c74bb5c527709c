"""Times an audit against a plain training epoch, on scikit-learn's digits and the demo's convnet.

Run as ``python -m benchmarks.audit_cost``; ``--store`` keeps the rows. ``--model narrow`` uses a convnet so
small that the fixed costs of an audit dominate. Epochs and audits alternate, so that a slow phase of the
machine affects all of them; the fastest of each counts, in CPU time of this process. An epoch loads with a
`DataLoader` and steps with Adam, at the audit's batch size and at 64, the demo's batch size. An audit is
timed in three parts: the pass over the data, the pass with the analysis of its rows, and a whole audit with
the labels, tables and pictures of the demo.

From the first audit on, a process keeps the memory that a batch frees, which speeds up epochs too, by a third
at 1024 samples. So some epochs are timed before the first audit, as in training, and some alternate with
audits; ratios are relative to the latter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.fastest import fastest, fastest_rows
from benchmarks.rows import RESULTS, Row, file_name, provenance, write
from pergrad.attribution import Samples, analyse
from pergrad.audit import AuditOptions, Spec, run_audit
from pergrad.audit.streaming.gradients import Gradients, joined_rows
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.streaming.stream import batches_in
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.cli.malloc import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mislabelled_digits as digits

_TRAINED_WITH = 64
_TITLES = {
    "plain": "a plain training epoch",
    "plain-64": "a plain training epoch, B=64",
    "plain-before": "a plain training epoch, before the first audit",
    "pass": "the pass over the data",
    "analysis": "with the analysis",
    "audit": "all of an audit",
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


MODELS: dict[str, Callable[[int], nn.Module]] = {"demo": digits.convnet, "narrow": narrow}
_MODEL_TITLES = {"demo": "convnet of 32 and 64 channels", "narrow": "convnet of 16 and 32 channels"}


def trained_spec(model_name: str, seed: int) -> Spec:
    """Returns the digits with 5% of the labels flipped, and a convnet trained for a few epochs."""
    data = digits.digits_with_flips(0.05, seed)
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
    return Samples(indices, rows.loss, rows.norm, groups, rows.sketch)


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


def rows(
    batch_size: int, sketch_dim: int, rounds: int, seed: int, model_name: str = "demo"
) -> list[Row]:
    """Returns a row per timed function; `ratio` is relative to the plain epoch at the same batch size."""
    made = provenance(torch.device("cpu"), of_commit=None, rounds=rounds, steps=1, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        spec = trained_spec(model_name, seed)
        before = {"plain-before": lambda: epoch(spec, model_name, batch_size)}
        seconds = fastest(before, rounds, warm_up=1, clock=time.process_time)
        timed = steps(spec, model_name, Path(folder), batch_size, sketch_dim)
        seconds |= fastest(timed, rounds, warm_up=1, clock=time.process_time)
    return fastest_rows(
        seconds,
        _TITLES,
        size="digits",
        model=f"digits-{model_name}",
        model_title=f"{_MODEL_TITLES[model_name]} on 1797 digits, B={batch_size}",
        quantity="audit",
        note=f"the fastest; sketches of {sketch_dim}",
        provenance=made,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--sketch-dim", type=int, default=AuditOptions.sketch_dim)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = rows(
        options.batch_size, options.sketch_dim, options.rounds, options.seed, options.model
    )
    base = {row.method: row.fastest or 0.0 for row in found}
    print(found[0].model_title)
    for row in found:
        taken = base[row.method]
        print(
            f"{row.method_title:46} {taken * 1e3:7.1f} ms  {row.ratio:5.2f}x"
            f"  {taken / base['plain-before']:5.2f}x of one before"
            f"  {taken / base['plain-64']:5.2f}x of one at {_TRAINED_WITH}"
        )
    if options.store:
        name = file_name(
            "digits", "float32", found[0].provenance, part=f"{options.model}-{options.batch_size}"
        )
        path = RESULTS / "audit_cost" / name  # not for the README's table
        write(path, found)
        print(path.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
