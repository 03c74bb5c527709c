"""Renders the stored rows as markdown, and keeps the table in a document equal to them.

``python -m benchmarks.table`` prints the newest run of each size and precision; ``--write FILE``
puts it between the two markers in the file; ``--check FILE`` exits 1 where the file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import rows
from benchmarks.rows import Row

START, END = "<!-- benchmark-table:start -->", "<!-- benchmark-table:end -->"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status == "ok":
        if row.ratio is None or row.memory_ratio is None:
            return f"{1e3 * (row.seconds or 0):.0f} ms"
        return f"{row.ratio:.2f} ({row.memory_ratio:.2f})"
    if row.status in ("failed", "wrong"):
        return {"failed": "fails", "wrong": "WRONG"}[row.status]
    if row.status == "skipped":
        return "–"
    raise ValueError(f"unknown status {row.status!r} of {row.method} on {row.model}")


def _notes(results: list[Row]) -> list[str]:
    """A line per method and reason: an error that several models share is said once."""
    where: dict[tuple[str, str, str], list[str]] = {}
    for row in results:
        if row.status != "ok":
            key = (row.method_title, row.status, row.note)
            where.setdefault(key, []).append(row.model)
    return [
        f"- {method}, {status} on {', '.join(models)}: {note}"
        for (method, status, note), models in where.items()
    ]


def render(results: list[Row]) -> str:
    """A markdown table, models as columns: the ratio to plain training (and of its peak memory)."""
    models = {row.model: row.model_title for row in results}
    methods = {row.method: row.method_title for row in results}
    cells = {(row.method, row.model): row for row in results}
    lines = ["| | " + " | ".join(models.values()) + " |", "|---" * (len(models) + 1) + "|"]
    for method, title in methods.items():
        found = [_cell(cells.get((method, model))) for model in models]
        lines.append(f"| {title} | " + " | ".join(found) + " |")
    base = {row.model: row for row in results if row.method == "plain" and row.status == "ok"}
    if base:
        absolute = [
            f"{1e3 * (base[m].seconds or 0):.1f} ms, {(base[m].peak_bytes or 0) / 1e6:.0f} MB"
            if m in base
            else ""
            for m in models
        ]
        lines.append("| plain, absolute | " + " | ".join(absolute) + " |")
    notes = _notes(results)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def caption(results: list[Row], name: str) -> str:
    """One line: machine, versions, commit, rounds and the file that the table comes from."""
    first = results[0]
    run = first.provenance
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    commit = run.commit + (" with local changes" if run.dirty else "")
    return (
        f"Time as a multiple of plain forward and backward (peak memory as a multiple of its), "
        f"{first.precision}, median of {run.rounds} rounds of {run.steps} steps; {run.machine}; "
        f"{versions}; commit {commit}, {run.date[:10]}; rows in `benchmarks/results/{name}`."
    )


def spread(results: list[Row]) -> str:
    """How far the rounds lie apart: seconds and ratio with their interquartile ranges."""
    lines = [""]
    for row in results:
        if row.seconds is None or row.seconds_iqr is None:
            continue
        times = "{:.1f} [{:.1f}, {:.1f}] ms".format(
            *(1e3 * t for t in (row.seconds, *row.seconds_iqr))
        )
        line = f"{row.model:12} {row.method:17} {times:>32}"
        if row.ratio is not None and row.ratio_iqr is not None:
            line += "   ratio {:.2f} [{:.2f}, {:.2f}]".format(row.ratio, *row.ratio_iqr)
        lines.append(line)
    return "\n".join(lines)


def newest(folder: Path) -> list[tuple[str, list[Row]]]:
    """(file name, rows) of the newest run of each size and precision."""
    latest: dict[tuple[str, str], tuple[str, list[Row]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        results = rows.read(path)
        key = (results[0].size, results[0].precision)
        known = latest.get(key)
        if known is None or known[1][0].provenance.date <= results[0].provenance.date:
            latest[key] = (path.name, results)
    return [latest[key] for key in sorted(latest)]


def document(runs: list[tuple[str, list[Row]]]) -> str:
    """All tables with their captions, as they stand between the markers."""
    return "\n\n".join(f"{render(results)}\n\n{caption(results, name)}" for name, results in runs)


def placed(text: str, tables: str) -> str:
    """The text with the tables between its markers."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"expected the markers {START} and {END} once each")
    head, rest = text.split(START)
    if END not in rest:
        raise SystemExit(f"expected {START} before {END}")
    return f"{head}{START}\n{tables}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Print, write or check the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", help="these files, not the newest ones")
    parser.add_argument("--results", type=Path, default=rows.RESULTS, help="where to look for them")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.rows is not None:
        runs = [(path.name, rows.read(path)) for path in options.rows]
    else:
        runs = newest(options.results)
    if not runs:
        raise SystemExit(f"no rows in {options.results}; run python -m benchmarks.run first")
    tables = document(runs)
    path = options.write or options.check
    if path is None:
        print(tables)
        return 0
    text = path.read_text()
    wanted = placed(text, tables)
    if options.write is not None:
        path.write_text(wanted)
        return 0
    if text != wanted:
        print(f"{path}: the table is not the one of the stored rows; ", end="", file=sys.stderr)
        print(f"run python -m benchmarks.table --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
