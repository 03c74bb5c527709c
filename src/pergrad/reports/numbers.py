"""Formats numbers and names for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["aligned", "batch_size", "count", "duration", "middle_cut", "number", "share"]

_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: float | None) -> str:
    """Formats a number with three significant digits, with an exponent only if it is very large or small.

    >>> [number(v) for v in (0.0, 0.01234, 12.345, 1797.0, 5.3e9, 2e-7, None, float("nan"))]
    ['0', '0.0123', '12.3', '1,797', '5.3 × 10⁹', '2 × 10⁻⁷', '–', 'not finite']
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        digits, _, exponent = f"{value:.2g}".partition("e")
        if not exponent:
            digits, _, exponent = f"{value:.1e}".partition("e")
        return f"{digits} × 10{str(int(exponent)).translate(_RAISED)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def batch_size(value: float) -> str:
    """Formats a batch size: a whole number with two significant digits, the precision of the estimate.

    >>> [batch_size(v) for v in (0.1, 1.99, 87.1, 288.7, 19209.7)]
    ['1', '2', '87', '290', '19,000']
    """
    return f"{float(f'{max(1.0, value):.2g}'):,.0f}"


def count(value: int, noun: str, plural: str | None = None) -> str:
    """Formats a count with its noun in singular or plural.

    >>> count(1, "sample"), count(1797, "sample"), count(2, "copy", "copies")
    ('1 sample', '1,797 samples', '2 copies')
    """
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def share(value: float) -> str:
    """Formats a share in percent; small shares are not rounded to 0%, nor large ones to 100%.

    >>> [share(v) for v in (0.0, 0.0004, 0.023, 0.62, 0.9996, 1.0)]
    ['0%', '<0.1%', '2.3%', '62%', '>99.9%', '100%']
    """
    percent = 100 * value
    if 0 < percent < 0.1:
        return "<0.1%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.1f}%" if 0 < percent < 10 or 99 < percent < 100 else f"{percent:.0f}%"


def duration(seconds: float | None) -> str:
    """Formats seconds in a suitable unit.

    >>> [duration(s) for s in (0.0421, 3.21, 74.6, 3725.0, None)]
    ['42 ms', '3.2 s', '1 min 15 s', '1 h 2 min', '–']
    """
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def aligned(values: Sequence[float]) -> list[str]:
    """Formats a column of numbers with the same number of decimals.

    >>> aligned([0.5, 12.25, 3.125]), aligned([1.0, float("nan")]), aligned([0.00001, 0.5])
    (['0.50', '12.25', '3.12'], ['1.000', 'not finite'], ['0.000', '0.500'])
    """
    finite = [abs(value) for value in values if math.isfinite(value)]
    largest = max(finite, default=0.0)
    if largest >= 1e7 or 0 < largest < 1e-3:
        return [number(value) for value in values]
    decimals = 3 if largest < 10 else 2 if largest < 100 else 1 if largest < 1000 else 0
    return [f"{v:,.{decimals}f}" if math.isfinite(v) else "not finite" for v in values]


def middle_cut(name: str, most: int = 56) -> str:
    """Shortens a long name in the middle: its beginning and its end both identify it.

    >>> middle_cut("encoder.layers.0.attention.weight", 17)
    'encoder.…n.weight'
    """
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"
