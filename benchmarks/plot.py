"""Draws the stored rows: the ratios of each table as bars, and each sweep as curves.

``python -m benchmarks.plot`` writes SVGs under docs/assets/. Equal rows give equal bytes. The background is
transparent and the text a grey that is readable on white and on black; pergrad differs from its peers in
lightness as well as in hue.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks import rows, scaling
from benchmarks.methods import BASES, METHODS
from benchmarks.rows import Row
from benchmarks.switches import Place, Switch, switches
from benchmarks.table import Table, stored, tables

ASSETS = Path(__file__).parents[1] / "docs" / "assets"

TEXT, FAINT = "#777777", "#9a9a9a"
OURS, PEERS, BASE = "#0072B2", "#E69F00", "#9a9a9a"  # Okabe and Ito's blue and orange
CURVES = {"plain": "#9a9a9a", "grads": "#E69F00", "norms": "#0072B2", "clipped": "#009E73"}
MARKERS = {"plain": "o", "grads": "s", "norms": "^", "clipped": "D"}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pergrad",
    "svg.fonttype": "none",
    "font.size": 8.5,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def save(figure: Figure, path: Path) -> None:
    """Writes a figure whose bytes depend on nothing but its contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path,
        format="svg",
        transparent=True,
        bbox_inches="tight",
        metadata={"Date": None, "Creator": None},
    )


def _colour(row: Row) -> str:
    if row.quantity in BASES:
        return BASE
    known = METHODS.get(row.method)
    return OURS if known is not None and known.requires == "pergrad" else PEERS


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(title, 24))


def bars(table: Table, path: Path) -> None:
    """Draws a panel for each model and a bar for each method; the line is plain training."""
    methods = [name for name in table.methods if name != "plain"]
    columns = [column.rows for column in table.columns.values()]
    with mpl.rc_context(STYLE):
        size = (1.6 + 1.7 * len(columns), 0.7 + 0.24 * len(methods))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for panel, column in zip(panels, columns, strict=True):
            _panel(panel, {row.method: row for row in column}, methods)
            panel.set_title(_wrapped(column[0].model_title), fontsize=8.5)
        panels[0].set_yticks(range(len(methods)), [table.methods[name] for name in methods])
        panels[0].invert_yaxis()
        label = f"{table.title}: time as a multiple of plain training ({table.precision})"
        figure.supxlabel(label, fontsize=8.5)
        save(figure, path)


def _panel(panel: Any, found: dict[str, Row], methods: list[str]) -> None:
    ratios = {name: row.ratio for name, row in found.items() if row.ratio is not None}
    longest = max([1.0, *(ratios[name] for name in methods if name in ratios)])
    for place, name in enumerate(methods):
        row = found.get(name)
        if row is None:
            continue
        if name in ratios:
            panel.barh(place, ratios[name], height=0.72, color=_colour(row))
            text, at = f"{ratios[name]:.2f}", ratios[name]
        else:
            text, at = _reason(row), 0.0
        panel.text(at + 0.02 * longest, place, text, va="center", fontsize=7.5)
    panel.axvline(1, color=TEXT, linewidth=0.8, linestyle=(0, (4, 3)))
    panel.set_xlim(0, 1.22 * longest)
    panel.tick_params(axis="y", length=0)


def _reason(row: Row) -> str:
    """Returns the reason for a missing bar: the kind of error; the table has the full text."""
    kind = row.note.split(":")[0]
    shown = {"failed": f"fails ({kind})" if kind else "fails", "wrong": "WRONG"}
    if row.status == "skipped":
        return "not installed" if row.note.endswith("is not installed") else "not run"
    return shown[row.status]


def _neighbours(found: Iterable[Switch]) -> list[list[Switch]]:
    """Groups switches of the same layers that are too close to tell apart in a curve, in order."""
    together: list[list[Switch]] = []
    for switch in sorted(found, key=lambda switch: switch.value):
        for others in together:
            is_near = switch.value <= 1.06 * others[0].value
            if is_near and switch.layers == others[0].layers:
                others.append(switch)
                break
        else:
            together.append([switch])
    return together


def _mark(panel: Any, some: list[Switch], *, is_above: bool) -> None:
    """Draws a labelled line where pergrad switches its algorithm; labels alternate between both ends."""
    panel.axvline(some[0].value, color=FAINT, linewidth=0.6, linestyle=(0, (2, 2)))
    panel.text(
        some[0].value,
        0.99 if is_above else 0.01,
        f"{some[0].layers}: {', '.join(switch.after for switch in some)}",
        transform=panel.get_xaxis_transform(),
        rotation=90,
        va="top" if is_above else "bottom",
        ha="right",
        fontsize=5.5,
    )


def curves(points: list[scaling.Point], path: Path) -> None:
    """Draws time above and peak memory below, against each varied size; both axes are logarithmic.

    Dashed lines show where pergrad's cost functions choose another algorithm.
    """
    axes = list(dict.fromkeys(point.axis for point in points))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.6 * len(axes) + 0.8, 4.4), layout="constrained")
        panels = figure.subplots(2, len(axes), sharex="col", squeeze=False)
        for number, axis in enumerate(axes):
            own = [point for point in points if point.axis == axis]
            for quantity in dict.fromkeys(point.quantity for point in own):
                found = [p for p in own if p.quantity == quantity and p.status == "ok"]
                values = [point.value for point in found]
                for panel, figures in (
                    (panels[0][number], [1e3 * (point.seconds or 0) for point in found]),
                    (panels[1][number], [(point.peak_bytes or 0) / 1e6 for point in found]),
                ):
                    panel.plot(
                        values,
                        figures,
                        label=scaling.TITLES[quantity],
                        color=CURVES[quantity],
                        marker=MARKERS[quantity],
                        markersize=3.5,
                        linewidth=1.4,
                    )
                    panel.set_xscale("log", base=2)
                    panel.set_yscale("log")
                    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                    panel.yaxis.set_minor_formatter(NullFormatter())
                    panel.grid(visible=True, which="major", color=FAINT, alpha=0.25, linewidth=0.5)
            bottom = panels[1][number]
            ticks = sorted({point.value for point in own})
            place_of_run = Place.of(own[0].size, own[0].precision)
            found_switches = switches(own[0].shape, axis, ticks, place_of_run)
            for place, some in enumerate(_neighbours(found_switches)):
                _mark(panels[0][number], some, is_above=place % 2 == 0)
            bottom.set_xticks(ticks, [str(value) for value in ticks])
            bottom.set_xlabel(scaling.AXES[axis])
        panels[0][0].set_ylabel("milliseconds a step")
        panels[1][0].set_ylabel("peak memory, MB")
        panels[1][0].legend(frameon=False, labelcolor=TEXT)  # above are the marks
        save(figure, path)


def _pictures(folder: Path, results: Path, sweeps: Path) -> Iterable[Path]:
    for table in tables(stored(results)):
        name = table.title.replace(" ", "-")
        path = folder / f"benchmark-{table.size}-{table.precision}-{name}.svg"
        bars(table, path)
        yield path
    for points in scaling.newest(sweeps):
        path = folder / f"scaling-{points[0].size}-{points[0].precision}.svg"
        curves(points, path)
        yield path


def main(arguments: list[str] | None = None) -> int:
    """Draws all stored rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ASSETS, help="output folder")
    parser.add_argument("--results", type=Path, default=rows.RESULTS)
    parser.add_argument("--scaling", type=Path, default=scaling.RESULTS)
    options = parser.parse_args(arguments)
    for path in _pictures(options.folder, options.results, options.scaling):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
