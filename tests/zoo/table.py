"""Runs the whole zoo and writes what came of it: `python -m tests.zoo.table --write tests/zoo/RESULTS.md`."""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from pergrad.errors import PergradError
from tests.zoo.architecture import Architecture
from tests.zoo.architectures import ARCHITECTURES, FAMILIES
from tests.zoo.checking import Case, WrongGradientsError, cases_of, largest_error

VERDICTS = ("exact", "refused", "wrong", "error")  # from the best to the worst


@dataclass
class Row:
    """What came of the cases of an architecture."""

    name: str
    architecture: Architecture
    verdicts: Counter[str] = field(default_factory=Counter)
    error: float = 0.0  # the largest, of the cases in float64 throughout
    failures: list[tuple[Case, BaseException]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return max(self.verdicts, key=VERDICTS.index)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            model = self.architecture.model_class(
                self.architecture.model_class.config_class(
                    **copy.deepcopy(self.architecture.config)
                )
            )
        return sum(p.numel() for p in model.parameters())

    def line(self) -> str:
        verdict = self.verdict
        if verdict != "exact":
            reason = str(self.failures[0][1]).split("\n")[0].replace("|", "\\|")
            verdict = f"{verdict}: {reason}"
        error = f"{self.error:.0e}" if self.verdicts["exact"] else ""
        cases = f"{self.verdicts['exact']}/{self.verdicts.total()}"
        model = self.architecture.model
        return f"| {self.name} | `{model}` | {self.parameters:,} | {cases} | {verdict} | {error} |"


def run(name: str, device: str = "cpu", cases: int | None = None) -> Row:
    architecture = ARCHITECTURES[name]
    row = Row(name, architecture)
    for case in itertools.islice(cases_of(architecture), cases):
        try:
            error = largest_error(architecture, case, device)
        except Exception as failure:
            row.failures.append((case, failure))
            kinds = {PergradError: "refused", WrongGradientsError: "wrong", Exception: "error"}
            verdict = next(word for kind, word in kinds.items() if isinstance(failure, kind))
        else:
            verdict = "exact"
            if case.tolerance <= 1e-9:
                row.error = max(row.error, error)
        row.verdicts[verdict] += 1
    return row


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    count = Counter(row.verdict for row in rows)
    found = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    cases = sum(row.verdicts.total() for row in rows)
    yield "# The zoo"
    yield ""
    yield (
        f"{len(rows)} architectures of Hugging Face, {cases} cases: {found}. Written by "
        "`python -m tests.zoo.table --write tests/zoo/RESULTS.md` with "
        f"transformers {transformers.__version__} and torch {torch.__version__}."
    )
    yield ""
    yield (
        "Each is compared with one backward a sample: batches as large as the sequence is long, as "
        "there are heads, as the model is wide, of one sample and of three; eager attention and SDPA; "
        "padded and not; every implementation of experts; the loss outside and the model's own. "
        "`cases`: exact ones of all. `error`: the largest over the cases in float64, relative to the "
        "largest element of the parameter's gradient; exact is 1e-9 or less."
    )
    by_name = {row.name: row for row in rows}
    for family, members in FAMILIES.items():
        present = [by_name[name] for name in members if name in by_name]
        if present:
            yield f"\n## {family}\n"
            yield "| architecture | class | parameters | cases | verdict | error |"
            yield "|---|---|---|---|---|---|"
            yield from (row.line() for row in present)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--write", type=Path, help="where the table goes")
    parser.add_argument("--device", default="cpu", help="where to run; the table is the CPU's")
    parser.add_argument("--cases", type=int, help="how many of each architecture; by default all")
    parser.add_argument("--traceback", action="store_true", help="print those of failures")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name in options.names or ARCHITECTURES:
        start = time.perf_counter()
        row = run(name, options.device, options.cases)
        rows.append(row)
        print(f"{time.perf_counter() - start:5.1f} s  {name}: {dict(row.verdicts)}", flush=True)
        for case, failure in row.failures:
            print(f"    {case}: {type(failure).__name__}: {str(failure)[:300]}")
            if options.traceback:
                traceback.print_exception(failure)
    if options.write is not None:
        options.write.write_text("\n".join(markdown(rows)) + "\n")
    expected = {row.name: "refused" if row.architecture.refusal else "exact" for row in rows}
    return int(any(row.verdict != expected[row.name] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
