"""Counts the rungs of the zoo's parameters: `python -m tests.zoo.explained --write tests/zoo/RUNGS.md`."""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import pergrad
from tests.zoo.architectures import ARCHITECTURES, FAMILIES
from tests.zoo.checking import Case, loss_fn_of, prepared
from tests.zoo.precision import default_dtype

__all__ = ["BELOW", "Rungs", "rungs_of"]

# The rungs that run a function more than once for each parameter; all others cost about a plain step.
BELOW = ("vmap", "masked VJP", "loop")


@dataclass
class Rungs:
    """How many parameters of an architecture are on each rung, and which are below broadcast."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    below: list[str] = field(default_factory=list)
    why_not: str = ""  # the model does not run, or is refused


def rungs_of(name: str) -> Rungs:
    """Explains one recorded step in float32, with eager experts and the best attention."""
    found = Rungs(name)
    try:
        architecture = ARCHITECTURES[name]
        case = _Single(3, architecture.attention()[-1])
        with default_dtype(torch.float32):
            model, batch = prepared(architecture, case, "cpu")
            loss_fn = loss_fn_of(architecture, case, nullcontext())
            report = pergrad.explain(model, loss_fn, *batch)
    except Exception as error:
        found.why_not = f"{type(error).__name__}: {error}".splitlines()[0]
        return found
    for row in report.rows:
        found.counts[row.rung or "unused"] += 1
        if row.rung in BELOW:
            found.below.append(f"`{row.name}` {row.shape}: {row.rung}, {', '.join(row.functions)}")
    return found


class _Single(Case):
    dtype = torch.float32


def markdown(rows: Sequence[Rungs]) -> Iterator[str]:
    total = sum((row.counts for row in rows), Counter[str]())
    used = total.total() - total["unused"]
    slow = sum(total[rung] for rung in BELOW)
    ran = sum(not row.why_not for row in rows)
    yield "# How the parameters of the zoo are computed"
    yield ""
    yield (
        f"{slow} of {used} parameters ({100 * slow / max(used, 1):.2f} %) of {ran} architectures are below a "
        "rule or broadcast. Written by `python -m tests.zoo.explained --write tests/zoo/RUNGS.md` with "
        f"transformers {transformers.__version__} and torch {torch.__version__}: `pergrad.explain` of one "
        "step of each. derived: one pull-back for all samples. expanded: repeated for each sample."
    )
    yield ""
    yield "| rung | parameters |"
    yield "|---|---|"
    yield from (f"| {rung} | {count} |" for rung, count in total.most_common())
    yield ""
    yield "| family | parameters | below | architectures with some below |"
    yield "|---|---|---|---|"
    by_name = {row.name: row for row in rows}
    for family, members in FAMILIES.items():
        present = [by_name[name] for name in members if name in by_name]
        counts = sum((row.counts for row in present), Counter[str]())
        some = ", ".join(row.name for row in present if row.below) or "-"
        yield f"| {family} | {counts.total()} | {sum(counts[r] for r in BELOW)} | {some} |"
    for heading, lines in (
        ("Below broadcast", [f"- {row.name}: {line}" for row in rows for line in row.below]),
        ("Not run", [f"- {row.name}: {row.why_not}" for row in rows if row.why_not]),
    ):
        if lines:
            yield f"\n## {heading}\n"
            yield from lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; by default all")
    parser.add_argument("--write", type=Path, help="where the table goes")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name in options.names or list(ARCHITECTURES):
        rows.append(rungs_of(name))
        print(
            name, dict(rows[-1].counts), rows[-1].why_not, *rows[-1].below, sep="\n  ", flush=True
        )
    if options.write:
        options.write.write_text("\n".join(markdown(rows)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
