"""Shows the newest stored rows of Hugging Face models as a table and a chart for each size."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks import rows
from benchmarks.hugging_face.subjects import SUBJECTS
from benchmarks.plot import FAINT, OURS, PEERS, STYLE, TEXT, save
from benchmarks.rows import Provenance, Row
from benchmarks.table import shortened

__all__ = ["MARKERS", "RESULTS", "document", "draw", "newest"]

MARKERS = "<!-- benchmark-models:start -->", "<!-- benchmark-models:end -->"
RESULTS = rows.RESULTS / "models"
METHODS = {
    "pergrad-norms": "norms, recorded",
    "pergrad-clipped": "clipped sum, recorded",
    "pergrad-norms-compiled": "norms, compiled",
    "pergrad-clipped-compiled": "clipped sum, compiled",
    "pergrad-grads-compiled": "full gradients, compiled",
}


def newest(folder: Path) -> dict[str, dict[str, dict[str, Row]]]:
    """Returns the newest row by size, model and method; files are named by their date."""
    found: dict[str, dict[str, dict[str, Row]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in rows.read(path):
            found.setdefault(row.size, {}).setdefault(row.model, {})[row.method] = row
    return found


def document(found: dict[str, dict[str, dict[str, Row]]]) -> str:
    """Renders a table for each size, with its machine and what failed."""
    parts = []
    for size, models in found.items():
        shown = [row for methods in models.values() for row in methods.values()]
        lines = [
            f"| {size}, {shown[0].precision} | {' | '.join(METHODS.values())} |",
            "|---" * (len(METHODS) + 1) + "|",
        ]
        notes = []
        for name in [name for name in SUBJECTS if name in models]:
            cells = []
            for method in METHODS:
                row = models[name].get(method)
                is_ok = row is not None and row.status == "ok"
                cells.append(
                    f"{row.ratio:.2f}" if is_ok and row is not None else "fails" if row else ""
                )
                if row is not None and row.note:
                    notes.append(f"- {row.model_title}, {METHODS[method]}: {shortened(row.note)}")
            lines.append(f"| {SUBJECTS[name].title_at(size)} | {' | '.join(cells)} |")
        caption = " ".join(_made(row.provenance) for row in _first_of_each_run(shown))
        parts.append("\n".join([*lines, "", caption, *notes]))
    return "\n\n".join(parts)


def _first_of_each_run(shown: list[Row]) -> list[Row]:
    runs: dict[str, list[Row]] = {}
    for row in shown:
        runs.setdefault(row.provenance.date, []).append(row)
    return [runs[date][0] for date in sorted(runs)]


def _made(made: Provenance) -> str:
    """Says where and from what a run was made."""
    return (
        f"{made.machine}; commit {made.commit}, {made.date[:10]}, torch {made.versions['torch']}, "
        f"{made.rounds} rounds."
    )


COLOURS = dict(zip(METHODS, (OURS, PEERS, "#56B4E9", "#F0E442", "#009E73"), strict=True))


def draw(found: dict[str, dict[str, dict[str, Row]]], folder: Path) -> list[Path]:
    """Draws a chart for each size: a group of bars for each model; the line is training of the same kind."""
    paths = []
    for size, models in found.items():
        names = [name for name in SUBJECTS if name in models]
        shown = [m for m in METHODS if any(m in models[name] for name in names)]
        with mpl.rc_context(STYLE):
            figure = Figure(
                figsize=(6.0, 0.6 + 0.2 * len(shown) * len(names)), layout="constrained"
            )
            panel = figure.subplots()
            height = 0.8 / len(shown)
            for k, method in enumerate(shown):
                bars = {
                    place + k * height: models[name][method].ratio or 0.0
                    for place, name in enumerate(names)
                    if method in models[name]
                }
                panel.barh(
                    list(bars),
                    list(bars.values()),
                    height,
                    color=COLOURS[method],
                    label=METHODS[method],
                )
            panel.axvline(1, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
            middle = 0.4 - height / 2
            panel.set_yticks(
                [place + middle for place in range(len(names))],
                [SUBJECTS[n].title_at(size) for n in names],
            )
            panel.invert_yaxis()
            panel.grid(visible=True, axis="x", color=FAINT, alpha=0.25, linewidth=0.5)
            panel.set_xlabel(f"time as a multiple of training of the same kind ({size})")
            panel.legend(frameon=False, labelcolor=TEXT)
            paths.append(folder / f"benchmark-models-{size}.svg")
            save(figure, paths[-1])
    return paths
