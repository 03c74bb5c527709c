"""Formats the headline for a terminal: sentences and a compact table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pergrad.audit.subject.texts import as_line
from pergrad.reports.numbers import aligned
from pergrad.reports.reading import Results, read_results
from pergrad.reports.words import headline as headline_of
from pergrad.reports.words import suggested_label

__all__ = ["headline", "kept_words", "overview"]


def headline(audit: str | Path | Results) -> tuple[str, ...]:
    """Returns the findings of an audit, one sentence per line, the most important first, then its notes.

    Refuses a folder without a finished audit.
    """
    results = audit if isinstance(audit, Results) else read_results(audit)
    return (*headline_of(results), *_notes(results))


def kept_words(folder: Path) -> list[str]:
    """Says what a results folder keeps beside its results, and how to shrink it."""
    held = sum(chunk.stat().st_size for chunk in (folder / "chunks").glob("*"))
    if not held:
        return []
    return [
        f"kept: {held / 1e6:,.1f} MB in {folder / 'chunks'}, to change the report without computing again; "
        "remove this folder to shrink it"
    ]


def _notes(results: Results) -> list[str]:
    return [f"note: {note}" for note in results.summary.get("notes") or ()]


def overview(folder: str | Path, *, rows: int = 10) -> RenderableType:
    """Returns the headline and a table of the most suspicious samples, for `rich.print`.

    Names and labels are printed literally, not as markup.
    """
    results = read_results(folder)
    first, *others = headline_of(results)
    others = [*others, *_notes(results)]
    lines = [Text(as_line(first), style="bold"), *(Text(as_line(line)) for line in others)]
    return Group(*lines, Text(), _table(results, rows))


def _table(results: Results, rows: int) -> Table:
    top = results.top(rows)
    indices = [int(index) for index in results.samples["index"][top]]
    labels = [results.label(index) for index in indices]
    opposing = [suggested_label(results, index) for index in indices]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("sample", justify="right", no_wrap=True)
    columns: list[list[str]] = [
        [str(int(rank)) for rank in results.samples["rank"][top]],
        [str(index) for index in indices],
    ]
    for heading, values in (("label", labels), ("others say", opposing)):
        if any(value is not None for value in values):
            table.add_column(heading, overflow="ellipsis", max_width=12, no_wrap=True)
            columns.append(["" if value is None else value for value in values])
    by = ("doubt", "doubt") if results.judges_labels else ("influence", "self_influence")
    for heading, name in (
        ("loss", "loss"),
        ("norm", "norm"),
        by,
        ("alignment", "alignment"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
        columns.append(aligned(results.samples[name][top].tolist()))
    for cells in zip(*columns, strict=True):
        table.add_row(*(Text(as_line(cell)) for cell in cells))
    return table
