"""`python -m mutation`: changes random lines and reports the changes that no test notices."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mutation.changes import Mutation, choose, mutations_of
from mutation.report import load_accepted, report
from mutation.trials import Outcome, Trial, import_all_but_the_package, run_trials
from mutation.witnesses import Project, Uses, Witnesses

GOAL = 0.9
# Most mutations are noticed at once; the others get all the time that is left.
_FIRST_SECONDS, _FIRST_FILES = 4.0, 3
_MOST_TESTS = 3000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if too few mutations are noticed."""
    options = _parser().parse_args(arguments)
    project = Project(options.root.resolve())
    mutations = [m for path in project.sources() for m in mutations_of(project.root, path)]
    accepted = load_accepted(Path(__file__).with_name("accepted.toml"), mutations)
    if options.only:
        mutations = [m for m in mutations if options.only in f"{m.path}:{m.line}"]
    chosen = choose(mutations, options.count, options.seed)
    witnesses = Witnesses.of(project, workers=options.workers, reuse=options.reuse_coverage)
    import_all_but_the_package()
    runs = Runs(project, witnesses, options.workers, options.budget)
    results = runs.of(chosen)
    text = report(results, accepted, seed=options.seed, goal=GOAL)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(text)
    noticed = sum(outcome.noticed for _, outcome in results)
    print(f"{noticed} of {len(results)} noticed; the report is in {options.report}")
    return 0 if noticed >= GOAL * len(results) else 1


class Runs:
    """Runs mutations with the tests that can notice them."""

    def __init__(self, project: Project, witnesses: Witnesses, workers: int, budget: float) -> None:
        self._root = project.root
        self._witnesses = witnesses
        self._uses = Uses(witnesses.sources)
        self._workers = workers
        self._budget = budget
        self._unreliable: set[str] = set()

    def of(self, mutations: Sequence[Mutation]) -> list[tuple[Mutation, Outcome]]:
        """Finds the outcome of each mutation: runs a few tests first, and all others if these pass."""
        tests = [self._witnesses.tests_for(m, self._uses) for m in mutations]
        outcomes = [Outcome("not run")] * len(mutations)
        wanted = [k for k in range(len(mutations)) if tests[k]]
        self._unreliable |= self._failing_anyway({tests[k][0] for k in wanted})
        while wanted:
            self._run(wanted, mutations, tests, outcomes, _FIRST_SECONDS, _FIRST_FILES)
            left = [k for k in wanted if not outcomes[k].noticed]
            self._run(left, mutations, tests, outcomes, self._budget, sys.maxsize)
            failing = self._failing_anyway({outcomes[k].test for k in wanted} - {""})
            self._unreliable |= failing
            wanted = [k for k in wanted if outcomes[k].test in failing]
        return list(zip(mutations, outcomes, strict=True))

    def _run(
        self,
        wanted: Sequence[int],
        mutations: Sequence[Mutation],
        tests: Sequence[Sequence[str]],
        outcomes: list[Outcome],
        budget: float,
        most_files: int,
    ) -> None:
        trials = [
            Trial(mutations[k], *self._selected(tests[k], budget, most_files), budget=self._budget)
            for k in wanted
        ]
        begun = time.monotonic()
        done = 0
        for number, outcome in run_trials(self._root, trials, self._workers):
            k = wanted[number]
            if not outcome.noticed and outcome.tests < outcomes[k].tests:
                continue
            outcomes[k] = outcome
            done += 1
            mutation = mutations[k]
            print(
                f"[{done}/{len(wanted)} {time.monotonic() - begun:.0f}s] {outcome.how:15} "
                f"{outcome.seconds:5.1f}s {outcome.tests:4} tests  {mutation.path}:{mutation.line} "
                f"{mutation.after[:70]}",
                flush=True,
            )

    def _selected(
        self, tests: Sequence[str], budget: float, most_files: int
    ) -> tuple[list[str], list[float]]:
        found: list[str] = []
        files: set[str] = set()
        total = 0.0
        for test in tests:
            seconds = self._witnesses.seconds[test]
            file = test.partition("::")[0]
            is_new = file not in files
            if test in self._unreliable or (is_new and len(files) >= most_files):
                continue
            if found and total + seconds > budget:
                continue
            files.add(file)
            found.append(test)
            total += seconds + 0.002
            if len(found) >= _MOST_TESTS:
                break
        return found, [self._witnesses.seconds[test] for test in found]

    def _failing_anyway(self, tests: set[str]) -> set[str]:
        """Finds tests that fail without any mutation, so that their failure says nothing."""
        known = sorted(test for test in tests if test in self._witnesses.seconds)
        seconds = [self._witnesses.seconds[test] for test in known]
        if not known:
            return set()
        trial = Trial(None, known, seconds, budget=float("inf"), stop_at_first=False)
        ((_, outcome),) = run_trials(self._root, [trial], 1)
        if outcome.how not in ("survived", "failed"):
            raise RuntimeError(
                f"no test ran on the unchanged sources; fix this first:\n{outcome.log}"
            )
        if outcome.failed:
            print(f"not counted, since they fail without a change too: {', '.join(outcome.failed)}")
        return set(outcome.failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    root = Path(__file__).parents[1]
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for the lines and their changes"
    )
    parser.add_argument("--count", type=int, default=200, help="number of lines to change")
    parser.add_argument("--workers", type=int, default=2, help="number of parallel processes")
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of tests for each change"
    )
    parser.add_argument("--only", default="", help="only lines whose path:line contains this")
    parser.add_argument("--report", type=Path, default=root / "build" / "mutants.md")
    parser.add_argument("--root", type=Path, default=root, help=argparse.SUPPRESS)
    parser.add_argument(
        "--reuse-coverage",
        action="store_true",
        help="keep the coverage of changed sources; faster, and nearly right",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
