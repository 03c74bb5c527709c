"""Renders the stored rows as markdown, and keeps the tables in a document equal to them.

``python -m benchmarks.table`` prints a table for each size, precision and quantity. Each method is from the
newest run that timed it on the model, and its ratio is to plain training in that run. ``--write FILE`` writes
the tables between the two markers in the file; ``--check FILE`` exits with 1 if the file differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks import rows
from benchmarks.methods import BASES, METHODS, TITLES
from benchmarks.models import MODELS
from benchmarks.rows import Row

START, END = "<!-- benchmark-table:start -->", "<!-- benchmark-table:end -->"
LONGEST = 130  # characters of an error


@dataclass(frozen=True)
class Column:
    """Stored runs of one quantity on one model."""

    runs: list[tuple[str, list[Row]]]  # file name, rows; the newest first

    def run_of(self, method: str) -> tuple[str, list[Row]] | None:
        """Returns the newest run that tried the method, or else the newest that names it."""
        naming = [run for run in self.runs if method in [row.method for row in run[1]]]
        for run in naming:
            if any(row.method == method and row.status != "skipped" for row in run[1]):
                return run
        return naming[0] if naming else None

    @property
    def rows(self) -> list[Row]:
        """Returns one row per method, in the order of the methods; unknown methods come last."""
        found = []
        for name in dict.fromkeys(row.method for _, run in self.runs for row in run):
            run = self.run_of(name)
            assert run is not None
            found += [row for row in run[1] if row.method == name]
        return sorted(found, key=lambda row: _place(row.method))

    @property
    def sources(self) -> dict[str, Row]:
        """Returns the files of the rows, with one row each."""
        named = [(self.run_of(row.method), row) for row in self.rows]
        return {run[0]: row for run, row in named if run is not None}


@dataclass(frozen=True)
class Table:
    """The rows of one quantity at one size and precision, beside those of plain training."""

    size: str
    precision: str
    title: str  # of the quantity
    columns: dict[str, Column]  # by model

    @property
    def rows(self) -> list[Row]:
        """Returns the rows of all columns."""
        return [row for column in self.columns.values() for row in column.rows]

    @property
    def methods(self) -> dict[str, str]:
        """Returns the titles of the methods by name, without the title of the table."""
        titles = {row.method: row.method_title.removeprefix(f"{self.title}: ") for row in self.rows}
        return {name: titles[name] for name in sorted(titles, key=_place)}


def _place(method: str) -> tuple[bool, int]:
    """Returns the sort key of a method: plain training first, unknown methods last."""
    known = METHODS.get(method)
    is_base = known is not None and known.quantity in BASES
    return not is_base, list(METHODS).index(method) if known is not None else len(METHODS)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status == "ok":
        if row.ratio is None:
            return f"{1e3 * (row.seconds or 0):.0f} ms"
        memory = "" if row.memory_ratio is None else f" ({row.memory_ratio:.2f})"
        return f"{row.ratio:.2f}{memory}"
    if row.status in ("failed", "wrong"):
        return {"failed": "fails", "wrong": "WRONG"}[row.status]
    if row.status == "skipped":
        return "not installed" if row.note.endswith("is not installed") else "–"
    raise ValueError(f"unknown status {row.status!r} of {row.method} on {row.model}")


def _notes(table: Table) -> list[str]:
    """Returns one shortened line per error, shared by all methods and models that have it."""
    where: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in table.rows:
        if row.status != "ok" and _cell(row) != "not installed":
            by_method = where.setdefault((row.status, row.note), {})
            by_method.setdefault(table.methods[row.method], []).append(row.model)
    lines = []
    for (status, note), by_method in where.items():
        models = dict.fromkeys(model for found in by_method.values() for model in found)
        lines.append(
            f"- {' and '.join(by_method)}, {status} on {', '.join(models)}: {shortened(note)}"
        )
    return lines


def shortened(note: str) -> str:
    """Shortens an error to one line of markdown: class names without modules, cut at the end."""
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", note)
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def render(table: Table) -> str:
    """Renders a markdown table with models as columns: the ratio to plain training (and of peak memory)."""
    models = {row.model: row.model_title for row in table.rows}
    cells = {(row.method, row.model): row for row in table.rows}
    lines = [
        f"| {table.title} | " + " | ".join(models.values()) + " |",
        "|---" * (len(models) + 1) + "|",
    ]
    for method, title in table.methods.items():
        found = [_cell(cells.get((method, model))) for model in models]
        lines.append(f"| {title} | " + " | ".join(found) + " |")
    base = {row.model: row for row in table.rows if row.method == "plain" and row.status == "ok"}
    if base:
        absolute = [
            f"{1e3 * (base[m].seconds or 0):.1f} ms, {(base[m].peak_bytes or 0) / 1e6:.0f} MB"
            if m in base
            else ""
            for m in models
        ]
        lines.append("| plain, absolute | " + " | ".join(absolute) + " |")
    notes = _notes(table)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def caption(row: Row) -> str:
    """Returns one line with machine, versions, commit and rounds of a row's run."""
    run = row.provenance
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    commit = run.commit[:12] + (" with local changes" if run.dirty else "")
    return (
        f"Time as a multiple of plain forward and backward (peak memory as a multiple of its), "
        f"{row.precision}, median of {run.rounds} rounds of {run.steps} steps; {run.machine}; "
        f"{versions}; commit {commit}, {run.date[:10]}"
    )


def spread(results: list[Row]) -> str:
    """Formats the spread of the rounds: seconds and ratio with their interquartile ranges."""
    lines = [""]
    for row in results:
        if row.seconds is None or row.seconds_iqr is None:
            continue
        times = "{:.1f} [{:.1f}, {:.1f}] ms".format(
            *(1e3 * t for t in (row.seconds, *row.seconds_iqr))
        )
        line = f"{row.model:12} {row.method:25} {times:>32}"
        if row.ratio is not None and row.ratio_iqr is not None:
            line += "   ratio {:.2f} [{:.2f}, {:.2f}]".format(row.ratio, *row.ratio_iqr)
        lines.append(line)
    return "\n".join(lines)


def _columns(results: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yields (title of a quantity, model, its rows and those of plain training) of a run."""
    for model in dict.fromkeys(row.model for row in results):
        own = [row for row in results if row.model == model]
        found = {row.quantity for row in own}
        for quantity, title in TITLES.items():
            if quantity in found:
                yield title, model, [r for r in own if r.quantity in (*BASES, quantity)]
        if found <= set(BASES):
            yield "training", model, own


def tables(runs: list[tuple[str, list[Row]]]) -> list[Table]:
    """Returns a table for each size, precision and quantity."""
    found: dict[tuple[str, str, str], dict[str, list[tuple[str, list[Row]]]]] = {}
    for name, results in sorted(runs, key=lambda run: run[1][0].provenance.date, reverse=True):
        first = results[0]
        for title, model, rows_of_model in _columns(results):
            columns = found.setdefault((first.size, first.precision, title), {})
            columns.setdefault(model, []).append((name, rows_of_model))
    known_models, titles = list(MODELS), [*TITLES.values(), "training"]
    ordered = sorted(found, key=lambda key: (key[0], key[1], titles.index(key[2])))
    return [
        Table(
            *key,
            {
                model: Column(found[key][model])
                for model in [
                    *(m for m in known_models if m in found[key]),
                    *(m for m in found[key] if m not in known_models),
                ]
            },
        )
        for key in ordered
    ]


def stored(folder: Path) -> list[tuple[str, list[Row]]]:
    """Reads (file name, rows) of every run in the folder."""
    return [(path.name, rows.read(path)) for path in sorted(folder.glob("*.jsonl"))]


def document(found: list[Table]) -> str:
    """Renders all tables; below those of one size and precision, a caption for each kind of run."""
    parts = []
    for _, group in groupby(found, key=lambda table: (table.size, table.precision)):
        some = list(group)
        parts += [render(table) for table in some]
        files: dict[str, dict[str, set[str]]] = {}  # caption -> file -> titles
        for table in some:
            for column in table.columns.values():
                for name, row in column.sources.items():
                    by_file = files.setdefault(caption(row), {})
                    by_file.setdefault(name, set()).add(table.title)
        order = [table.title for table in some]
        for text, by_file in files.items():
            of = sorted(set().union(*by_file.values()), key=order.index)
            label = f"{', '.join(of)}: " if len(files) > 1 else ""
            names = ", ".join(f"`benchmarks/results/{name}`" for name in sorted(by_file))
            parts.append(f"{label}{text}; rows in {names}.")
    return "\n\n".join(parts)


def placed(text: str, content: str, markers: tuple[str, str]) -> str:
    """Returns the text with the content between its markers."""
    start, end = markers
    if text.count(start) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected the markers {start} and {end} once each")
    head, rest = text.split(start)
    if end not in rest:
        raise SystemExit(f"expected {start} before {end}")
    return f"{head}{start}\n{content}\n{end}{rest.split(end)[1]}"


def settle(
    text: str, write: Path | None, check: Path | None, *, markers: tuple[str, str], module: str
) -> int:
    """Prints the text, or writes it between the markers of a file, or returns 1 if the file differs."""
    path = write or check
    if path is None:
        print(text)
        return 0
    before = path.read_text()
    wanted = placed(before, text, markers)
    if write is not None:
        path.write_text(wanted)
        return 0
    if before != wanted:
        print(f"{path}: the table differs from the stored rows; ", end="", file=sys.stderr)
        print(f"run python -m {module} --write {path}", file=sys.stderr)
        return 1
    return 0


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command that prints, writes or checks a rendering of the stored rows."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--results", type=Path, default=rows.RESULTS, help="folder of stored rows")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Prints, writes or checks the tables."""
    parser = parser_of("benchmarks.table", __doc__)
    parser.add_argument(
        "--rows", type=Path, nargs="+", help="use these files instead of the newest"
    )
    options = parser.parse_args(arguments)
    if options.rows is not None:
        runs = [(path.name, rows.read(path)) for path in options.rows]
    else:
        runs = stored(options.results)
    if not runs:
        raise SystemExit(f"no rows in {options.results}; run python -m benchmarks.run first")
    text = document(tables(runs))
    markers = START, END
    return settle(text, options.write, options.check, markers=markers, module="benchmarks.table")


if __name__ == "__main__":
    raise SystemExit(main())
