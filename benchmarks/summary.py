"""Compares pergrad and the best peer with training of their own kind, for the README.

A compiled step counts as a multiple of compiled training, a recorded one as a multiple of eager training,
each of the same run. ``python -m benchmarks.summary`` prints the table of the newest stored rows;
``--write FILE`` writes it between the two markers in the file; ``--check FILE`` exits with 1 if the file
differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.methods import BASES, METHODS
from benchmarks.table import Column, Table, parser_of, settle, stored, tables

MARKERS = "<!-- benchmark-summary:start -->", "<!-- benchmark-summary:end -->"
MODELS = {
    "transformer": "transformer",
    "vit": "ViT",
    "resnet": "ResNet",
    "mlp": "MLP",
    "lstm": "LSTM",
}


@dataclass(frozen=True)
class Kind:
    """How a step runs, and the training that it is compared with."""

    title: str
    base: str
    is_compiled: bool

    def has(self, name: str) -> bool:
        """Whether a method runs like that; JAX compiles always, and a CUDA graph is no like of either."""
        method = METHODS.get(name)
        if method is None or method.quantity in BASES or method.graphs:
            return False
        if "traced" in name:  # neither compiled nor run as the model is written
            return False
        return (method.compiled or name.startswith("jax")) == self.is_compiled


KINDS = (Kind("compiled", "plain-compiled", True), Kind("recorded", "plain", False))


def best(column: Column, kind: Kind, *, is_pergrad: bool) -> float | None:
    """Returns the least time as a multiple of the base in the same run; None without both."""
    found: dict[str, float] = {}
    for _, run in column.runs:  # the newest first
        ratios = {row.method: row.ratio for row in run if row.status == "ok" and row.ratio}
        for name, ratio in ratios.items():
            is_asked = kind.has(name) and name.startswith("pergrad") == is_pergrad
            if is_asked and kind.base in ratios:
                found.setdefault(name, ratio / ratios[kind.base])
    return min(found.values(), default=None)


def cells(found: list[Table]) -> Iterator[tuple[str, str, float, float | None]]:
    """Yields (line, model, pergrad's least multiple, that of the peers) for every cell of the table."""
    for kind in KINDS:
        for table in found:
            for model, column in table.columns.items():
                own = best(column, kind, is_pergrad=True)
                if own is not None:
                    is_gpu = table.size == "gpu"
                    machine = column.rows[0].provenance.machine if is_gpu else "CPU"
                    line = f"{table.title}, {kind.title}, {machine}, {table.precision}"
                    yield line, model, own, best(column, kind, is_pergrad=False)


def render(found: list[Table]) -> str:
    """Renders two lines for each quantity on each machine, and a column for each model."""
    lines: dict[str, dict[str, str]] = {}
    for line, model, own, peer in cells(found):
        is_ahead = peer is None or own <= peer
        ours, theirs = f"{own:.2f}", "–" if peer is None else f"{peer:.2f}"
        cell = f"**{ours}** ({theirs})" if is_ahead else f"{ours} (**{theirs}**)"
        lines.setdefault(line, {})[model] = cell
    text = [f"| | {' | '.join(MODELS.values())} |", "|---" * (len(MODELS) + 1) + "|"]
    for line, of_models in lines.items():
        text.append(f"| {line} | {' | '.join(of_models.get(model, '') for model in MODELS)} |")
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """Prints, writes or checks the table."""
    options = parser_of("benchmarks.summary", __doc__).parse_args(arguments)
    text = render(tables(stored(options.results)))
    return settle(text, options.write, options.check, markers=MARKERS, module="benchmarks.summary")


if __name__ == "__main__":
    raise SystemExit(main())
