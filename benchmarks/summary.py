"""Compares pergrad's best with the best peer for every quantity and model, for the README.

``python -m benchmarks.summary`` prints the table of the newest stored rows; ``--write FILE`` writes it
between the two markers in the file; ``--check FILE`` exits with 1 if the file differs.
"""

from __future__ import annotations

from benchmarks.table import Table, parser_of, settle, stored, tables
from benchmarks.targets import leads

MARKERS = "<!-- benchmark-summary:start -->", "<!-- benchmark-summary:end -->"
MODELS = {
    "transformer": "transformer",
    "vit": "ViT",
    "resnet": "ResNet",
    "mlp": "MLP",
    "lstm": "LSTM",
}


def render(found: list[Table]) -> str:
    """Renders a line for each quantity on each machine, and a column for each model."""
    cells: dict[str, dict[str, str]] = {}
    for table, model, own, peer in leads(found):
        machine = own.provenance.machine if table.size == "gpu" else "CPU"
        name = f"{table.title}, {machine}, {table.precision}"
        cells.setdefault(name, {})[model] = f"**{own.ratio:.2f}** ({peer.ratio:.2f})"
    lines = [f"| | {' | '.join(MODELS.values())} |", "|---" * (len(MODELS) + 1) + "|"]
    for name, of_models in cells.items():
        lines.append(f"| {name} | {' | '.join(of_models.get(model, '') for model in MODELS)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints, writes or checks the table."""
    options = parser_of("benchmarks.summary", __doc__).parse_args(arguments)
    text = render(tables(stored(options.results)))
    return settle(text, options.write, options.check, markers=MARKERS, module="benchmarks.summary")


if __name__ == "__main__":
    raise SystemExit(main())
