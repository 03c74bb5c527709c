"""Writes what is supported from what the tests run, and keeps the section of a document equal to it.

``python -m tests.support`` prints it; ``--write FILE`` puts it between the two markers in the file;
``--check FILE`` exits 1 where the file differs. The sources are the cases of the rules, the cases of the
modules, the zoo's table of results, and the stored rows of the models of other libraries.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor
from torch.overrides import resolve_name

from pergrad.engine.samples.propagation import name_of
from pergrad.rules import DECOMPOSITIONS, RULES
from tests.engine import module_cases
from tests.outside.judging import Row
from tests.outside.rendering import ratio_of, tally, timed
from tests.outside.rows import stored
from tests.rules import cases as rule_cases
from tests.rules.test_rules import FUNCTIONS, defaults_of

__all__ = ["END", "RESULTS", "START", "Architecture", "architectures", "main", "placed", "section"]

START, END = "<!-- support-table:start -->", "<!-- support-table:end -->"
RESULTS = Path(__file__).parent / "zoo" / "RESULTS.md"
_WIDTH = 104
_DIMENSIONS = ("1d", "2d", "3d")


# -- functions


def _family(function: Callable[..., Any]) -> str:
    """The file that its rule is in."""
    rule = RULES.get(function)
    source = DECOMPOSITIONS[function] if rule is None else rule.gradients
    return source.__module__.rpartition(".")[2]


def _given(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that some case gives a value other than the default."""
    defaults = defaults_of(function)
    changed = {
        name
        for case in rule_cases.CASES
        if case.function is function
        for name, value in case.given(defaults).items()
        if isinstance(value, Tensor) or value != defaults[name]
    }
    return tuple(name for name in defaults if name in changed)


def _functions() -> Iterator[str]:
    """A row for the functions of a family whose cases give the same arguments."""
    rows: dict[tuple[str, tuple[str, ...]], tuple[dict[str, None], int]] = {}
    for function in FUNCTIONS:
        count = sum(case.function is function for case in rule_cases.CASES)
        if not count or resolve_name(function) is None:  # not torch's: a step of our own
            continue
        name = name_of(function)
        key = (_family(function), _given(function))
        known = next((k for k, (names, _) in rows.items() if k[0] == key[0] and name in names), key)
        names, before = rows.get(known, ({}, 0))
        names[name] = None
        rows[known] = names, before + count
    yield "| functions | arguments given in the cases | cases |"
    yield "|---|---|---|"
    for (_, given), (names, count) in sorted(rows.items(), key=lambda row: row[0][0]):
        functions = ", ".join(f"`{name}`" for name in names)
        yield f"| {functions} | {', '.join(given)} | {count} |"


# -- modules


def _modules() -> list[str]:
    """The names, with those of one, two and three dimensions as one."""
    names = sorted(cls.__name__ for cls in module_cases.CASES)
    shown: dict[str, None] = {}
    for name in names:
        stem = name[:-2]
        in_all = name.endswith(_DIMENSIONS) and all(f"{stem}{d}" in names for d in _DIMENSIONS)
        shown[f"`{stem}1d`–`3d`" if in_all else f"`{name}`"] = None
    return list(shown)


# -- architectures


@dataclass(frozen=True)
class Architecture:
    """A row of the zoo's table."""

    name: str
    cases: str  # exact ones of all
    verdict: str
    reason: str


def architectures(table: str) -> list[Architecture]:
    """The rows of the zoo's table.

    >>> architectures("| A, tied | `A` | 8 | 1/4 | refused: `cat` mixes. Do that | 2e-16 |")
    [Architecture(name='A (tied)', cases='1/4', verdict='refused', reason='`cat` mixes')]
    """
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if len(cells) != 6 or not re.fullmatch(r"\d+/\d+", cells[3]):
            continue
        name, *variant = cells[0].split(", ", 1)
        verdict, _, reason = cells[4].partition(": ")
        found.append(
            Architecture(
                f"{name} ({variant[0]})" if variant else name,
                cells[3],
                verdict,
                reason.partition(". ")[0],
            )
        )
    return found


def _zoo(table: str) -> Iterator[str]:
    rows = architectures(table)
    if not rows:
        raise SystemExit(f"no architectures in {RESULTS}; run `make zoo` first")
    versions = re.search(r"transformers [\w.]+ and torch [\w.]+", table)
    run = f" with {versions[0].removesuffix('.')}" if versions else ""
    verdicts = list(dict.fromkeys(["exact", *(row.verdict for row in rows)]))
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in verdicts}
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    cases = sum(int(row.cases.partition("/")[2]) for row in rows)
    yield _wrapped(
        f"**Hugging Face.** {len(rows)} architectures in tiny random configurations, {cases} cases: "
        f"{tally}, run{run}. What each case varies, and the error of each architecture, is in "
        "`tests/zoo/RESULTS.md` of the repository."
    )
    yield ""
    yield f"<details><summary>The {counts['exact']} that are exact in every case</summary>"
    yield ""
    yield _wrapped(", ".join(row.name for row in rows if row.verdict == "exact") + ".")
    yield ""
    yield "</details>"
    for verdict in verdicts[1:]:
        yield ""
        yield f"{verdict.capitalize()}, with the number of cases that are exact all the same:"
        yield ""
        by_reason: dict[str, list[str]] = {}
        for row in rows:
            if row.verdict == verdict:
                exact, _, of = row.cases.partition("/")
                by_reason.setdefault(row.reason, []).append(f"{row.name} ({exact} of {of})")
        for reason, names in by_reason.items():
            yield _wrapped(f"- {', '.join(names)}: {reason}.", indent="  ")


# -- models of other libraries


def _outside(rows: Sequence[Row]) -> Iterator[str]:
    judged = [row for row in rows if not row.is_timed]
    if not judged:
        raise SystemExit("no rows of other libraries; run `make outside` first")
    libraries: dict[str, list[Row]] = {}
    for row in judged:
        libraries.setdefault(row.library, []).append(row)
    yield _wrapped(
        f"**Other libraries.** {len(judged)} models of {len(libraries)} libraries in tiny random "
        f"configurations, run with torch {judged[0].torch.partition('+')[0]}: {tally(judged)}. "
        "Each is compared with one backward pass per sample; a refusal is right where a sample run "
        "alone has another loss than in its batch. `make outside` runs them; versions, reasons and "
        "errors are in "
        "`tests/outside/RESULTS.md` of the repository."
    )
    yield ""
    found = timed(rows)
    if found:
        yield _wrapped(
            f"A step that records norms takes {median(map(ratio_of, found)):.2f} times as long as a plain "
            f"one in the median of {len(found)} larger models whose plain step takes 50 ms or more, on a "
            f"CPU that was shared with other work; the slowest, {found[0].name} of {found[0].library}, "
            f"{ratio_of(found[0]):.2f} times."
        )
        yield ""
    yield "<details><summary>The libraries, and how many of their models are exact</summary>"
    yield ""
    counts = (
        f"{name} ({sum(row.verdict == 'exact' for row in found)} of {len(found)})"
        for name, found in sorted(libraries.items(), key=lambda item: item[0].lower())
    )
    yield _wrapped(", ".join(counts) + ".")
    yield ""
    yield "</details>"


# -- the whole


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def section(table: str) -> str:
    """The section, given the text of the zoo's table."""
    modules = sum(map(len, module_cases.CASES.values()))
    parts = [
        _wrapped(
            f"**Functions.** Those with a rule of their own, or written in terms of such; "
            f"{len(rule_cases.CASES)} cases, each in float64 and float32, for every choice of frozen "
            "and trainable weights, against one backward pass per sample."
        ),
        "",
        *_functions(),
        "",
        _wrapped(
            f"**Modules.** Every class of `torch.nn` that has parameters: "
            f"{len(module_cases.CASES)} classes, {modules} cases, each with batches of three sizes, "
            f"in float64: {', '.join(_modules())}. The normalisations over the batch in eval mode, "
            "lazy modules after their first call."
        ),
        "",
        *_zoo(table),
        "",
        *_outside(list(stored().values())),
    ]
    return "\n".join(parts)


def placed(text: str, tables: str, start: str = START, end: str = END) -> str:
    """The text with the section between its markers."""
    if text.count(start) != 1 or text.count(end) != 1 or text.index(end) < text.index(start):
        raise SystemExit(f"expected the markers {start} and {end} once each, in this order")
    head, rest = text.split(start)
    return f"{head}{start}\n{tables}\n{end}{rest.split(end)[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    tables = section(RESULTS.read_text())
    path: Path | None = options.write or options.check
    if path is None:
        print(tables)
        return 0
    text = path.read_text()
    wanted = placed(text, tables)
    if options.write is not None:
        path.write_text(wanted)
    elif text != wanted:
        print(
            f"{path}: the support section is not that of the tests; run "
            f"python -m tests.support --write {path}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
