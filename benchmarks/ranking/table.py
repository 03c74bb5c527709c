"""Summarises the cells of the ranking benchmark: means by state of training, older and new cells apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.ranking.training import STATES

__all__ = ["markdown", "tables", "with_table"]

_CLOSE = 0.25  # relative error of a count that is close enough
_TITLES = {
    "A": "A: label-free gradients, leave-one-out",
    "B": "B: A, mean over 5 checkpoints",
    "margin": "normalised margin, 5-fold (cleanlab)",
    "loss": "loss",
    "suspicion": "suspicion",
}


def tables(cells: list[dict[str, Any]]) -> list[Table]:
    """Returns a table of average precisions, one of counts, and one of outliers and duplicates."""
    found = []
    for title, some in (
        ("all cells", cells),
        ("cells used to choose", [cell for cell in cells if not cell["new"]]),
        ("new cells", [cell for cell in cells if cell["new"]]),
    ):
        noisy = [cell for cell in some if "ap" in cell]
        planted, few = _with_duplicates(some)
        if noisy:
            found += [_precisions(title, noisy)]
        if planted:
            found += [_planted(title, planted)]
        if few:
            found += [_planted(f"{title} of few columns", few)]
    return found


def _with_duplicates(
    cells: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the cells with outliers and near-duplicates, and those of few columns."""
    planted = [cell for cell in cells if "duplicates" in cell]
    few = [cell for cell in planted if "outliers" not in cell]
    return [cell for cell in planted if "outliers" in cell], few


def markdown(cells: list[dict[str, Any]]) -> str:
    """Returns the figures for the documentation: all cells, and in brackets those that are new."""
    noisy = [cell for cell in cells if "ap" in cell]
    planted, few = _with_duplicates(cells)
    lines = [f"| | {' | '.join(STATES)} |", "|---" * (1 + len(STATES)) + "|"]

    def add(
        title: str, some: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]
    ) -> None:
        entries = []
        for state in STATES:
            at = _at(some, state)
            new = [cell for cell in at if cell["new"]]
            entries.append(f"{_mean(map(value, at))} ({_mean(map(value, new))})")
        lines.append(f"| {title} | {' | '.join(entries)} |")

    for name, words in _TITLES.items():
        add(f"wrong labels, {words}", noisy, lambda cell, name=name: cell["ap"][name])  # type: ignore[misc]
    for name in ("A", "B"):
        add(
            f"their number by {name} within 25%",
            noisy,
            lambda cell, name=name: _is_close(cell["count"][name][1], cell["wrong"]),  # type: ignore[misc]
        )
    add("the suggested label is right", noisy, lambda cell: cell["suggested_right"])
    add("outliers", planted, lambda cell: cell["outliers"]["label-free self-influence"])
    add("outliers by the loss", planted, lambda cell: cell["outliers"]["loss"])
    for name in ("recall", "precision"):
        add(f"near-duplicates, {name}", planted, lambda cell, name=name: cell["duplicates"][name])  # type: ignore[misc]
    for name in ("recall", "precision") if few else ():
        add(f"of 2 to 4 columns, {name}", few, lambda cell, name=name: cell["duplicates"][name])  # type: ignore[misc]
    return "\n".join(lines)


def with_table(page: str, cells: list[dict[str, Any]], name: str = "ranking") -> str:
    """Returns the page with the figures between the two marks of that name."""
    start, end = f"<!-- {name}:start -->\n", f"<!-- {name}:end -->\n"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}{markdown(cells)}\n{end}{after}"


def _table(title: str, first: str) -> Table:
    table = Table(title=title)
    table.add_column(first)
    for state in STATES:
        table.add_column(state, justify="right")
    return table


def _precisions(title: str, cells: list[dict[str, Any]]) -> Table:
    table = _table(f"Wrong labels, {title} ({len(cells)}): average precision", "ranking")
    for name, words in _TITLES.items():
        table.add_row(words, *(_mean(c["ap"][name] for c in _at(cells, s)) for s in STATES))
    for name in ("A", "B"):
        table.add_row(
            f"number of errors by {name} within 25%",
            *(
                _mean(_is_close(c["count"][name][1], c["wrong"]) for c in _at(cells, s))
                for s in STATES
            ),
        )
        table.add_row(
            f"number of errors within the interval of {name}",
            *(
                _mean(_is_within(c["count"][name], c["wrong"]) for c in _at(cells, s))
                for s in STATES
            ),
        )
    table.add_row(
        "number of errors by the margin within 25%",
        *(_mean(_is_close(c["margin_count"], c["wrong"]) for c in _at(cells, s)) for s in STATES),
    )
    table.add_row(
        "suggested label is right",
        *(_mean(c["suggested_right"] for c in _at(cells, s)) for s in STATES),
    )
    table.add_row(
        "said to have memorised labels",
        *(_mean(c["says_memorised"] for c in _at(cells, s)) for s in STATES),
    )
    return table


def _planted(title: str, cells: list[dict[str, Any]]) -> Table:
    table = _table(f"Outliers and near-duplicates, {title} ({len(cells)})", "finding")
    for name in cells[0].get("outliers", ()):
        table.add_row(
            f"outliers by {name}, average precision",
            *(_mean(c["outliers"][name] for c in _at(cells, s)) for s in STATES),
        )
    for name in ("recall", "precision"):
        table.add_row(
            f"duplicates, {name}",
            *(_mean(c["duplicates"][name] for c in _at(cells, s)) for s in STATES),
        )
    return table


def _at(cells: list[dict[str, Any]], state: str) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["state"] == state]


def _is_close(count: int | None, wrong: int) -> bool:
    return count is not None and abs(count - wrong) <= _CLOSE * wrong


def _is_within(counts: list[int | None], wrong: int) -> bool:
    low, _, high = counts
    return low is not None and high is not None and low <= wrong <= high


def _mean(values: Iterable[float]) -> str:
    found = [float(value) for value in values]
    return f"{np.mean(found):.3f}" if found else "–"
