"""`python -m fuzz`: judges random programs and prints the smallest form of those that fail."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from fuzz.comparing import FAILURES, Outcome
from fuzz.processes import BLOCK, judge_all
from fuzz.programs import Program, draw, draw_each
from fuzz.registry import INGREDIENTS
from fuzz.report import Summary, describe
from fuzz.shrinking import Failure, shrink


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a program fails."""
    options = _parser().parse_args(arguments)
    if options.each:
        return _run_each(options.mixing, options.workers)
    chosen = draw(options.seed, mixing=options.mixing)
    programs = list(islice(chosen, options.start, options.start + options.programs))
    summary = Summary(options.seed, options.mixing)
    failed: list[tuple[int, Outcome]] = []
    begun = time.monotonic()
    for number, outcome in judge_all(programs, workers=options.workers):
        summary.add(programs[number], outcome)
        if outcome.failed:
            failed.append((number, outcome))
    summary.seconds = time.monotonic() - begun
    failures = []
    for failure in _smallest(programs, sorted(failed, key=lambda pair: pair[0]), options.shrink):
        print(describe(failure, options.seed), end="\n\n", flush=True)
        failures.append(failure)
    print(summary)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary.as_json(failures), indent=1) + "\n")
    return 1 if summary.failures else 0


def _run_each(mixing: bool, workers: int) -> int:
    """Prints the outcomes of each ingredient by itself; returns 1 if one fails."""
    names = [name for name, own in INGREDIENTS.items() if own.mixes == mixing]
    programs = [program for name in names for program in draw_each(name)]
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    reasons: dict[str, str] = {}
    for number, outcome in judge_all(programs, workers=workers):
        name = programs[number].steps[1].name
        counts[name][outcome.kind] += 1
        if outcome.kind != "exact":
            reasons.setdefault(name, f"{outcome.kind}: {outcome.why[:90]}")
    for name in names:
        numbers = " ".join(f"{n} {kind}" for kind, n in counts[name].most_common())
        classes = ",".join(map(str, INGREDIENTS[name].classes))
        print(f"{name:28} {classes:6} {numbers:32} {reasons.get(name, '')}")
    return 1 if any(count[kind] for count in counts.values() for kind in FAILURES) else 0


def _smallest(
    programs: Sequence[Program], failed: Sequence[tuple[int, Outcome]], most: int
) -> Iterator[Failure]:
    """Shrinks failures that no smaller one, found before, explains."""
    found: list[Failure] = []
    for number, outcome in failed:
        program = programs[number]
        if len(found) < most and not any(_explains(failure, program) for failure in found):
            earlier = programs[number - number % BLOCK : number]
            found.append(shrink(program.seed, program, outcome, earlier))
            yield found[-1]


def _explains(failure: Failure, program: Program) -> bool:
    """Whether a program has all the parts of a smaller one that fails."""
    small = failure.program
    parts = {step.name for step in small.steps if not step.ingredient.is_layer}
    if failure.before is not None or not (
        parts or small.call != "plain" or small.loss != "squares"
    ):
        return False
    return (
        parts <= {step.name for step in program.steps}
        and small.call in ("plain", program.call)
        and small.loss in ("squares", program.loss)
        and small.nan_first <= program.nan_first
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="random seed for the programs")
    parser.add_argument("--programs", type=int, default=1000, help="number of programs")
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument(
        "--mixing", action="store_true", help="programs with one function that mixes the samples"
    )
    parser.add_argument(
        "--each", action="store_true", help="small programs with each ingredient by itself instead"
    )
    parser.add_argument("--workers", type=int, default=2, help="number of parallel processes")
    parser.add_argument("--shrink", type=int, default=40, help="most failures to shrink and print")
    parser.add_argument("--json", type=Path, default=None, help="file to write the outcome to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
