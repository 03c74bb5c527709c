"""Writes the stored results as a table into the how-to page."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attribution.storing import Run, runs
from pergrad.evaluate import Evaluation

__all__ = ["markdown", "written"]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "attribution.md"
_TITLES = {
    "digits": "digits, MLP",
    "quantiles": "Gaussian quantiles, MLP",
    "convnet": "digits, convnet",
    "language": "language model",
}
_METHODS = {
    "index": "`pergrad.Index`, 5 checkpoints",
    "index, final model": "`pergrad.Index`, final model",
    "index, EK-FAC": "`pergrad.Index`, EK-FAC, 5 checkpoints",
    "gradient dots": "gradient dots",
    "kronfluence": "kronfluence, as it comes",
    "kronfluence, damped": "kronfluence, damped",
    "dattri": "dattri, conjugate gradients",
    "traker": "traker, 5 checkpoints",
    "nearest inputs": "nearest inputs",
    "nearest features": "nearest features",
    "BM25": "BM25",
    "random": "random",
}
_USED = ("torch", "kronfluence", "dattri", "traker")
_START, _END = "<!-- attribution:start -->", "<!-- attribution:end -->"


def markdown(found: Sequence[Run]) -> str:
    """Returns the table, with the machine and the versions below it."""
    if not found:
        return "No complete run is stored yet: `python -m benchmarks.attribution --store`."
    order = list(_TITLES)
    columns = [
        (f"{_TITLES[run.task]}, {run.epochs} epochs" + _what(part), part)
        for run in sorted(found, key=lambda run: (order.index(run.task), run.epochs))
        for part in run.evaluations
    ]
    lines = ["| | " + " | ".join(title for title, _ in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method, title in _METHODS.items():
        cells = [_cell(part, method) for _, part in columns]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    made = found[0].provenance
    versions = [f"{name} {made['versions'][name]}" for name in _USED if name in made["versions"]]
    where = (
        f"{made['machine']}; {', '.join(versions)}. Stored in `benchmarks/results/attribution/`."
    )
    return "\n".join([*lines, "", where])


def _what(part: Evaluation) -> str:
    return "" if part.name == "LDS" else f": planted sample {part.name}"


def _cell(part: Evaluation, method: str) -> str:
    if method not in part.values:
        return "–"
    estimate = part[method]
    return f"{estimate.mean:.2f} ± {estimate.half_width:.2f}"


def written(page: str, table: str) -> str:
    """Returns the page with the table between its marks."""
    found, count = re.subn(
        f"{_START}.*?{_END}", lambda _: f"{_START}\n{table}\n{_END}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for the table, between {_START} and {_END}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(argv)
    PAGE.write_text(written(PAGE.read_text(), markdown(runs())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
