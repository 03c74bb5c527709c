"""Runs the whole zoo and writes the results: `python -m tests.zoo.table --write tests/zoo/RESULTS.md`."""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from pergrad.errors import PergradError
from tests.zoo.architecture import Architecture
from tests.zoo.architectures import ARCHITECTURES, FAMILIES
from tests.zoo.checking import PlainModelError, cases_of, largest_error
from tests.zoo.comparing import WrongGradientsError
from tests.zoo.conditions import CONDITIONS, Condition, InapplicableError

VERDICTS = ("exact", "unrun", "refused", "wrong", "error")  # from the best to the worst
_KINDS: dict[type[BaseException], str] = {
    PlainModelError: "unrun",  # by the model's own fault
    PergradError: "refused",
    WrongGradientsError: "wrong",
    Exception: "error",
}


class Failure(NamedTuple):
    """Texts only: these travel between processes."""

    case: str
    kind: str
    message: str
    trace: str


@dataclass
class Row:
    """What came of the cases of an architecture, under each condition."""

    name: str
    seconds: float = 0.0
    verdicts: dict[Condition, Counter[str]] = field(default_factory=dict)
    errors: dict[Condition, float] = field(default_factory=dict)  # plain: of the cases in float64
    failures: list[Failure] = field(default_factory=list)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.name]

    @property
    def verdict(self) -> str:
        """The worst; what the model itself cannot do does not count."""
        return self._worst(list(self.verdicts))

    def _worst(self, conditions: Sequence[Condition]) -> str:
        counts = [self.verdicts.get(condition, Counter()) for condition in conditions]
        found = [verdict for of in counts for verdict in of if verdict in VERDICTS]
        return max(found, key=VERDICTS.index, default="unrun")

    @property
    def is_as_expected(self) -> bool:
        """The model's own failures are no surprise, but something must have been compared."""
        architecture = self.architecture
        if architecture.refusal:
            return self.verdict == "refused"
        for condition, verdicts in self.verdicts.items():
            expected = {"exact", "unrun", "inapplicable"}
            if condition == "reentrant" and architecture.reentrant == "refused":
                expected.add("refused")
            if not expected.issuperset(verdicts):
                return False
        return any(verdicts["exact"] for verdicts in self.verdicts.values())

    @property
    def parameters(self) -> str:
        if not hasattr(transformers, self.architecture.model):
            return "-"
        with torch.device("meta"):
            model = self.architecture.model_class(
                self.architecture.model_class.config_class(
                    **copy.deepcopy(self.architecture.config)
                )
            )
        return f"{sum(p.numel() for p in model.parameters()):,}"

    def count(self, condition: Condition) -> str:
        """The exact ones of all; "-" where the model does not do this at all."""
        verdicts = self.verdicts.get(condition, Counter())
        total = sum(verdicts[verdict] for verdict in VERDICTS)
        return f"{verdicts['exact']}/{total}" if total else "-"

    def line(self, conditions: Sequence[Condition]) -> str:
        verdict = self._worst(conditions)
        if verdict != "exact" and self.failures:
            reason = self.failures[0].message.split("\n")[0].replace("|", "\\|")
            verdict = f"{verdict}: {reason}"
        cells = [self.name, f"`{self.architecture.model}`", self.parameters]
        cells += [self.count(condition) for condition in conditions]
        errors = [self.errors.get(condition) for condition in conditions]
        cells += [verdict, ", ".join("-" if e is None else f"{e:.0e}" for e in errors)]
        return f"| {' | '.join(cells)} |"


def run(name: str, conditions: Sequence[Condition], device: str, cases: int | None) -> Row:
    row = Row(name)
    start = time.perf_counter()
    for condition in conditions:
        row.verdicts[condition] = Counter()
        try:
            of_condition = list(itertools.islice(cases_of(ARCHITECTURES[name], condition), cases))
        except AttributeError as error:  # this version of the library does not have the class
            row.failures.append(Failure("all", "unrun", str(error), ""))
            row.verdicts[condition]["unrun"] += 1
            continue
        for case in of_condition:
            try:
                error = largest_error(ARCHITECTURES[name], case, device)
            except InapplicableError as reason:
                row.verdicts[condition]["inapplicable"] += 1
                row.failures.append(Failure(str(case), "inapplicable", str(reason), ""))
            except Exception as failure:
                verdict = next(word for kind, word in _KINDS.items() if isinstance(failure, kind))
                row.verdicts[condition][verdict] += 1
                trace = "".join(traceback.format_exception(failure))
                kind = f"{verdict}: {type(failure).__name__}"
                row.failures.append(Failure(str(case), kind, str(failure), trace))
            else:
                row.verdicts[condition]["exact"] += 1
                if condition != "plain" or case.tolerance <= 1e-9:
                    row.errors[condition] = max(row.errors.get(condition, 0.0), error)
    row.seconds = time.perf_counter() - start
    return row


def quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def alone() -> None:
    """What a process of its own begins with."""
    quiet()
    torch.set_num_threads(1)


def rows_of(names: Sequence[str], one: Callable[[str], Row], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from map(one, names)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=alone) as pool:
        for name, future in [(name, pool.submit(one, name)) for name in names]:
            try:
                yield future.result()
            except (
                BrokenProcessPool
            ) as error:  # one that ran out of memory takes the others with it
                failure = Failure("all", "unrun", str(error), "")
                yield Row(name, verdicts={"plain": Counter(unrun=1)}, failures=[failure])


def markdown(rows: Sequence[Row], conditions: Sequence[Condition], command: str) -> Iterator[str]:
    count = Counter(row.verdict for row in rows)
    found = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    cases = sum(v.total() for row in rows for v in row.verdicts.values())
    yield "# The zoo"
    yield ""
    yield (
        f"{len(rows)} architectures of Hugging Face, {cases} cases: {found}. Written by "
        f"`{command}` with transformers {transformers.__version__} and torch {torch.__version__}."
    )
    yield ""
    yield (
        "Each is compared with one backward a sample: batches as large as the sequence is long, as "
        "there are heads, as the model is wide, of one sample and of three; eager attention and SDPA; "
        "padded and not; every implementation of experts; the loss outside and the model's own. "
        "`cases`: exact ones of all. `error`: the largest over the cases in float64, relative to the "
        "largest element of the parameter's gradient; exact is 1e-9 or less."
    )
    if len(conditions) > 1:
        yield ""
        yield (
            "`checkpoint`, `reentrant`: with the library's gradient checkpointing, non-reentrant and "
            "reentrant, against the loop without. `autocast`: float32 weights under bfloat16 autocast, "
            "against the loop under the same; its error is the distance of a sample's gradient from the "
            "loop's, relative to the longest of the parameter. It is at most 0.1, or twice what the loop "
            "itself is off from float32, while another sample's gradient is always further off; and the "
            "sum over the samples is as near to the ordinary gradient. "
            '"-": the model itself does not run so.'
        )
    by_name = {row.name: row for row in rows}
    header = ["architecture", "class", "parameters"]
    header += ["cases" if condition == "plain" else condition for condition in conditions]
    header += ["verdict", "error"]
    for family, members in FAMILIES.items():
        present = [by_name[name] for name in members if name in by_name]
        if present:
            yield f"\n## {family}\n"
            yield f"| {' | '.join(header)} |"
            yield "|" + "---|" * len(header)
            yield from (row.line(conditions) for row in present)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--write", type=Path, help="where the table goes")
    parser.add_argument("--device", default="cpu", help="where to run; the table is the CPU's")
    parser.add_argument("--cases", type=int, help="how many of each condition; by default all")
    parser.add_argument(
        "--conditions", default="plain", help=f"of {','.join(CONDITIONS)}; by default plain"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes; by default 1")
    parser.add_argument("--traceback", action="store_true", help="print those of failures")
    options = parser.parse_args(arguments)
    conditions = tuple(c for c in CONDITIONS if c in options.conditions.split(","))
    unknown = {*options.conditions.split(",")} - {*CONDITIONS} | {*options.names} - {*ARCHITECTURES}
    if unknown:
        parser.error(f"no such condition or architecture: {', '.join(sorted(unknown))}")
    quiet()
    one = partial(run, conditions=conditions, device=options.device, cases=options.cases)
    rows = []
    for row in rows_of(options.names or list(ARCHITECTURES), one, options.jobs):
        rows.append(row)
        found = ", ".join(
            f"{condition} {dict(verdicts)}"
            + (f" {row.errors[condition]:.0e}" if condition in row.errors else "")
            for condition, verdicts in row.verdicts.items()
        )
        print(f"{row.seconds:5.1f} s  {row.name}: {found}", flush=True)
        for failure in row.failures:
            print(f"    {failure.case}: {failure.kind}: {failure.message[:300]}")
            if options.traceback:
                print(failure.trace)
    for condition in conditions:
        total = sum((row.verdicts.get(condition, Counter()) for row in rows), Counter())
        print(f"{condition}: {dict(total)}")
    if options.write is not None:
        given = sys.argv[1:] if arguments is None else arguments
        command = " ".join(["python -m tests.zoo.table", *given])
        options.write.write_text("\n".join(markdown(rows, conditions, command)) + "\n")
    surprises = [row.name for row in rows if not row.is_as_expected]
    print(f"not as expected: {', '.join(surprises) or 'none'}")
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
