"""Draws charts as inline SVG: no script, no fonts, colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from pergrad.reports.numbers import count, number

__all__ = ["Histogram", "histogram", "histogram_svg"]

# Sized for a phone, so that text stays readable there; a desktop scales it up a little.
_WIDTH, _HEIGHT = 380, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 8, 22, 46
_RUG = 9  # height of the ticks of marked samples, below the axis


@dataclass(frozen=True)
class Histogram:
    """Counts of values between edges, evenly spaced on a logarithmic or a linear scale."""

    edges: np.ndarray  # (bins + 1,)
    counts: np.ndarray  # (bins,)
    is_log: bool
    left_out: int  # zeros on a logarithmic scale
    not_finite: int


def histogram(values: np.ndarray, *, bins: int = 36) -> Histogram:
    """Counts values in even bins; logarithmic if none is negative and the largest is over 10 medians.

    >>> import numpy as np
    >>> found = histogram(np.array([1.0, 2.0, 2.0, 3.0, np.nan]), bins=2)
    >>> found.edges.tolist(), found.counts.tolist(), found.not_finite
    ([1.0, 2.0, 3.0], [1, 3], 1)
    """
    finite = values[np.isfinite(values)].astype(np.float64)
    not_finite = len(values) - len(finite)
    if len(finite) == 0:
        return Histogram(np.array([0.0, 1.0]), np.zeros(1, dtype=np.int64), False, 0, not_finite)
    positive = finite[finite > 0]
    is_log = bool(
        finite.min() >= 0
        and len(positive) > 0
        and finite.max() > 10 * max(np.median(positive), 1e-300)
    )
    drawn = positive if is_log else finite
    low, high = float(drawn.min()), float(drawn.max())
    if is_log:
        # Nearly vanished values would take most of the width.
        low = max(low, high * 1e-8)
        edges = np.geomspace(low, high, bins + 1)
    elif low == high:
        # One bar in the middle.
        edges = low + max(1.0, abs(low)) * np.linspace(-0.5, 0.5, 10)
    else:
        edges = low + (high - low) * np.linspace(0, 1, bins + 1)
    # Rounding must not exclude the smallest and the largest value.
    edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
    counts, _ = np.histogram(np.clip(drawn, edges[0], edges[-1]), bins=edges)
    return Histogram(edges, counts, is_log, len(finite) - len(drawn), not_finite)


def histogram_svg(
    values: np.ndarray, marked: np.ndarray, *, name: str, title: str, marks: str
) -> str:
    """Draws bars of all values, a line at the median, and a tick below the axis for each marked value.

    Args:
        values: (n,) values of all samples.
        marked: (m,) values of the marked samples.
        name: prefix of ids within the page.
        title: name of the quantity.
        marks: name of the marked samples, such as "first 34".
    """
    found = histogram(values)
    median = float(np.median(values[np.isfinite(values)])) if found.counts.any() else math.nan
    description = (
        f"Histogram of {count(int(found.counts.sum()), 'sample')} by {title}, "
        f"{'logarithmic' if found.is_log else 'linear'} scale from {number(float(found.edges[0]))} to "
        f"{number(float(found.edges[-1]))}; median {number(median)}. Ticks below: {marks}."
    )
    x, y = _Axis.across(found), _Axis(0, max(1, int(found.counts.max())), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">',
        f'<title id="{name}-title">Distribution of {escape(title)}</title>',
        f'<desc id="{name}-desc">{escape(description)}</desc>',
        *_grid(y),
        *_bars(found, x, y),
        *_scale(found, x),
    ]
    if math.isfinite(median):
        at = x(max(median, found.edges[0]))
        anchor = "start" if at < _WIDTH * 0.6 else "end"
        shift = 4 if anchor == "start" else -4
        parts.append(
            f'<line class="median" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 8}" y2="{y.start}"/>'
        )
        parts.append(
            f'<text class="note" x="{at + shift:.1f}" y="{_TOP - 5}" text-anchor="{anchor}">'
            f"median {number(median)}</text>"
        )
    parts += _rug(marked, found, x)
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Axis:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def across(cls, found: Histogram) -> _Axis:
        low, high = float(found.edges[0]), float(found.edges[-1])
        return cls(low, high, _LEFT, _WIDTH - _RIGHT, found.is_log)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + (self.end - self.start) * min(1.0, max(0.0, part))


def _grid(y: _Axis) -> list[str]:
    parts = []
    for value in _round_ticks(0, y.high, 3):
        if value == int(value) and value > 0:
            at = y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
                f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
            )
    return parts


def _bars(found: Histogram, x: _Axis, y: _Axis) -> list[str]:
    parts = []
    for n, many in enumerate(found.counts.tolist()):
        if many:
            left, right = x(float(found.edges[n])), x(float(found.edges[n + 1]))
            # A single sample must stay visible.
            height = max(1.5, y.start - y(many))
            width = max(1.0, right - left - 1)
            parts.append(
                f'<rect class="bar" x="{left + 0.5:.1f}" y="{y.start - height:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}"/>'
            )
    return parts


def _scale(found: Histogram, x: _Axis) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    ticks = _powers(x.low, x.high) if found.is_log else _round_ticks(x.low, x.high, 4)
    for value in ticks:
        at = x(value)
        anchor = "end" if at > _WIDTH - 28 else "middle"
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - 18}" text-anchor="{anchor}">'
            f"{number(value)}</text>"
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
        )
    scale = "logarithmic scale" if found.is_log else "linear scale"
    parts.append(
        f'<text class="note" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{scale}</text>'
    )
    return parts


def _rug(marked: np.ndarray, found: Histogram, x: _Axis) -> list[str]:
    base = _HEIGHT - _BOTTOM + 4
    finite = marked[np.isfinite(marked)]
    if found.is_log:
        finite = finite[finite > 0]
    # Rounded, so that ten thousand samples do not draw ten thousand lines.
    places = sorted({round(x(float(value)), 1) for value in finite})
    return [f'<path class="rug" d="{"".join(f"M{at} {base}v{_RUG}" for at in places)}"/>']


def _powers(low: float, high: float) -> list[float]:
    """Returns at most six powers of ten within the range, or its ends."""
    exponents = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    step = max(1, math.ceil(len(exponents) / 6))
    found = [10.0**exponent for exponent in exponents if exponent % step == 0]
    return found or [low, high]


def _round_ticks(low: float, high: float, about: int) -> Sequence[float]:
    """Returns about as many round numbers within the range as asked for."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]
