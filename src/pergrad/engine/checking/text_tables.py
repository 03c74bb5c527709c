"""Writes plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes rows below a header, each column as wide as its longest cell, two spaces apart.

    >>> print(text_table(["name", "shape"], [["weight", "(3, 4)"]]))
    name    shape
    weight  (3, 4)
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)
