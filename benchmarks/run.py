"""Times every method on every model in one process and stores a row per result.

``python -m benchmarks.run --size cpu`` prints a table of ratios to plain training for each quantity;
``--quantity norms`` prints only one. Each method is first compared with a loop over the samples. A wrong
method is shown as WRONG and not timed, a failing one with its error, and one whose package is missing with a
note. A run of all models and all methods of its quantities is stored under benchmarks/results/; any other run
only with ``--output``. The file is rewritten after each round, so a stopped run keeps its results.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch

from benchmarks import rows, table
from benchmarks.arguments import add_run_arguments, parsed_run
from benchmarks.measure import Setting, measure, progress, results
from benchmarks.methods import BASES, METHODS, TITLES, Quantity
from benchmarks.models import MODELS
from benchmarks.turns import Turns

GPU_BUDGET = 540.0  # seconds


def methods_of(quantities: list[Quantity], device: torch.device, *, is_compiled: bool) -> list[str]:
    """Returns the methods of those quantities, and the baselines that every table shows."""
    return [
        method.name
        for quantity in (*BASES, *quantities)
        for method in METHODS.values()
        if method.quantity == quantity
        and method.compiled <= is_compiled
        and method.graphs <= (device.type == "cuda")
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quantity", nargs="+", choices=TITLES, default=list(TITLES))
    chosen.add_argument(
        "--methods", nargs="+", choices=METHODS, help="only these methods, and plain"
    )
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="include compiled methods: a minute for each of them on a large model",
    )
    parser.add_argument(
        "--checks",
        choices=["exact", "timed"],
        default="exact",
        help="compare with the loop in float64 and at the timed precision, or only at the latter",
    )
    parser.add_argument(
        "--budget",
        type=float,
        help=f"seconds, shared equally by the models (gpu: {GPU_BUDGET:.0f}, cpu: unlimited)",
    )
    parser.add_argument(
        "--turns",
        type=Path,
        help="lock file shared by several runs on one machine: all prepare before the first is timed",
    )
    parser.add_argument("--size", choices=["tiny", "cpu", "gpu"], default="cpu")
    add_run_arguments(parser, rounds=15, steps=3)
    options = parsed_run(parser, arguments)
    options.full = set(options.models) == set(MODELS) and options.methods is None
    if options.budget is None and options.size == "gpu":
        options.budget = GPU_BUDGET
    if options.methods is None:
        options.methods = methods_of(options.quantity, options.device, is_compiled=options.compiled)
    for name in options.methods:
        if METHODS[name].compiled and not options.compiled:
            parser.error(f"--methods {name} contradicts --no-compiled")
    if "plain" not in options.methods:
        options.methods.insert(0, "plain")  # the base of every ratio
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark, prints the tables and stores the rows."""
    options = parse(arguments)
    # Raised in each step of every peer that hooks modules; the results are checked.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    setting = Setting(options.size, options.precision, options.device, options.seed, options.checks)
    provenance = rows.provenance(
        options.device,
        of_commit=options.commit,
        rounds=options.rounds,
        steps=options.steps,
        seed=options.seed,
        checks=options.checks,
    )
    path = options.output
    if path is None and options.full and options.size != "tiny":
        part = "-".join(options.quantity) if len(options.quantity) < len(TITLES) else ""
        path = rows.RESULTS / rows.file_name(options.size, options.precision, provenance, part=part)
    begin, found, turns = time.monotonic(), {}, Turns(options.turns)
    for place, model in enumerate(options.models):
        share = None
        if options.budget is not None:
            left = max(0.0, options.budget - (time.monotonic() - begin))
            share = left / (len(options.models) - place)
        plan = {"rounds": options.rounds, "steps": options.steps, "seconds": share, "turns": turns}
        for entries in measure(model, options.methods, setting, **plan):
            found[model] = results(entries, setting, provenance)
            if path is not None:
                rows.update(path, [row for column in found.values() for row in column])
        progress(f"{model}: done after {time.monotonic() - begin:.0f} s")
    everything = [row for column in found.values() for row in column]
    print("\n\n".join(table.render(one) for one in table.tables([("", everything)])))
    print(table.spread(everything))
    if path is not None:
        print(f"stored {len(everything)} rows in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
