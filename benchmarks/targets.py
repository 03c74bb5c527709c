"""Compares the newest stored GPU rows with the project's goals, and pergrad with its peers in every cell.

``python -m benchmarks.targets`` prints, for each goal and model, the limit, the measured value and by how
much the goal is met or missed; then, for every table and model, pergrad's best against the best peer.
``--write FILE`` writes both between the two markers in the file; ``--check FILE`` exits with 1 if the file
differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.methods import BASES, METHODS, TITLES
from benchmarks.rows import Row
from benchmarks.table import Table, parser_of, settle, stored, tables

MARKERS = "<!-- benchmark-targets:start -->", "<!-- benchmark-targets:end -->"
SIZE, PRECISION = "gpu", "bfloat16"
MODELS = {"transformer": "transformer", "vit": "ViT-B/16", "resnet": "ResNet-18-GN"}


@dataclass(frozen=True)
class Target:
    """One goal: a method's figure relative to its base, at most `limits` for each model."""

    sentence: str
    method: str
    base: str
    figure: Literal["ratio", "peak_bytes"]  # a time counts by its ratio to plain in the same round
    limits: tuple[float, float, float]  # in the order of the models


TARGETS = [
    Target(
        "Norms, compiled, take less time than compiled training.",
        "pergrad-norms-compiled",
        "plain-compiled",
        "ratio",
        (0.85, 0.85, 1.3),
    ),
    Target(
        "A clipped sum, compiled, takes little more time than compiled training.",
        "pergrad-clipped-compiled",
        "plain-compiled",
        "ratio",
        (1.10, 1.10, 1.6),
    ),
    Target(
        "Full gradients, compiled, take little more time than compiled training.",
        "pergrad-compiled",
        "plain-compiled",
        "ratio",
        (1.15, 1.15, 2.0),
    ),
    Target(
        "Norms, as a CUDA graph, take less time than compiled training.",
        "pergrad-norms-graphs",
        "plain-compiled",
        "ratio",
        (0.85, 0.85, 1.3),
    ),
    Target(
        "A clipped sum, as a CUDA graph, takes little more time than compiled training.",
        "pergrad-clipped-graphs",
        "plain-compiled",
        "ratio",
        (1.10, 1.10, 1.6),
    ),
    Target(
        "Norms, as a CUDA graph, take less time than compiled training as CUDA graphs.",
        "pergrad-norms-graphs",
        "plain-graphs",
        "ratio",
        (0.85, 0.85, 1.3),
    ),
    Target(
        "A clipped sum, as a CUDA graph, takes little more time than compiled training as CUDA graphs.",
        "pergrad-clipped-graphs",
        "plain-graphs",
        "ratio",
        (1.10, 1.10, 1.6),
    ),
    Target(
        "Norms, eager, take about the time of eager training.",
        "pergrad-norms",
        "plain",
        "ratio",
        (1.1, 1.1, 1.8),
    ),
    Target(
        "Full gradients, eager, take a quarter more time than eager training.",
        "pergrad-record",
        "plain",
        "ratio",
        (1.25, 1.3, 2.5),
    ),
    Target(
        "Norms, traced and run without a compiler, take about the time of eager training.",
        "pergrad-norms-traced",
        "plain",
        "ratio",
        (1.1, 1.1, 1.8),
    ),
    Target(
        "Full gradients, traced and run without a compiler, take a quarter more time than eager training.",
        "pergrad-traced",
        "plain",
        "ratio",
        (1.25, 1.3, 2.5),
    ),
    Target(
        "Norms, eager, need about the memory of eager training.",
        "pergrad-norms",
        "plain",
        "peak_bytes",
        (1.10, 1.10, 1.25),
    ),
    Target(
        "Norms, traced and run without a compiler, need about the memory of eager training.",
        "pergrad-norms-traced",
        "plain",
        "peak_bytes",
        (1.10, 1.10, 1.25),
    ),
    Target(
        "Norms, compiled, need about the memory of compiled training.",
        "pergrad-norms-compiled",
        "plain-compiled",
        "peak_bytes",
        (1.10, 1.10, 1.25),
    ),
]


@dataclass(frozen=True)
class Verdict:
    """A target on one model; `measured` is None without rows, with the reason in `note`."""

    limit: float
    measured: float | None
    note: str

    @property
    def text(self) -> str:
        if self.measured is None:
            return f"≤ {self.limit:.2f}: {self.note}"
        off = 100 * abs(self.measured / self.limit - 1)
        is_met = self.measured <= self.limit
        word = f"met by {off:.0f} %" if is_met else f"**missed by {off:.0f} %**"
        return f"≤ {self.limit:.2f}: {self.measured:.2f}, {word}"


def judged(target: Target, model: str, limit: float, found: list[Table]) -> Verdict:
    """Judges a target by both figures of one run, the newest that tried the method on the model."""
    title = TITLES[METHODS[target.method].quantity]
    for table in found:
        if (table.size, table.precision, table.title) != (SIZE, PRECISION, title):
            continue
        column = table.columns.get(model)
        if column is None:
            continue
        run = column.run_of(target.method)
        own = {} if run is None else {row.method: row for row in run[1]}
        for name in (target.method, target.base):
            row = own.get(name)
            if row is None:
                return Verdict(limit, None, f"{name} was not run")
            if row.status != "ok":
                return Verdict(limit, None, f"{name} {row.status}: {row.note}")
        figures = [getattr(own[name], target.figure) for name in (target.method, target.base)]
        return Verdict(limit, figures[0] / figures[1], "")
    return Verdict(limit, None, "no rows")


def render_targets(found: list[Table]) -> str:
    """Renders a line for each target and a column for each model."""
    lines = [f"| goal | {' | '.join(MODELS.values())} |", "|---" * (len(MODELS) + 1) + "|"]
    for target in TARGETS:
        cells = [
            judged(target, model, limit, found).text
            for model, limit in zip(MODELS, target.limits, strict=True)
        ]
        lines.append(f"| {target.sentence} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(column: list[Row], *, is_pergrad: bool) -> Row | None:
    known = [row for row in column if row.ratio is not None and row.quantity not in BASES]
    ours = [row for row in known if row.method.startswith("pergrad") == is_pergrad]
    return min(ours, key=lambda row: row.ratio or 0, default=None)


def leads(found: list[Table]) -> Iterator[tuple[Table, str, Row, Row]]:
    """Yields (table, model, pergrad's fastest, the fastest peer) for every cell that has both."""
    for table in found:
        for model, column in table.columns.items():
            own, peer = (_best(column.rows, is_pergrad=mine) for mine in (True, False))
            if own is not None and peer is not None:
                yield table, model, own, peer


def render_leads(found: list[Table]) -> str:
    """Renders a line for each cell: how much faster or slower pergrad is than the best peer."""
    lines = ["| | pergrad | best peer | |", "|---|---|---|---|"]
    for table, model, own, peer in leads(found):
        assert own.ratio is not None
        assert peer.ratio is not None
        factor = peer.ratio / own.ratio
        cells = [
            f"{table.size}, {table.precision}, {table.title}, {model}",
            *(f"{row.ratio:.2f} ({table.methods[row.method]})" for row in (own, peer)),
            f"ahead {factor:.2f}x" if factor >= 1 else f"**behind {1 / factor:.2f}x**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def document(found: list[Table]) -> str:
    """Renders both tables."""
    return f"{render_targets(found)}\n\n{render_leads(found)}"


def main(arguments: list[str] | None = None) -> int:
    """Prints, writes or checks both tables."""
    options = parser_of("benchmarks.targets", __doc__).parse_args(arguments)
    text = document(tables(stored(options.results)))
    return settle(text, options.write, options.check, markers=MARKERS, module="benchmarks.targets")


if __name__ == "__main__":
    raise SystemExit(main())
