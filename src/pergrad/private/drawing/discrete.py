"""Draws from the discrete Gaussian by integer arithmetic alone (Canonne, Kamath and Steinke, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from pergrad.private.drawing.streams import Stream

__all__ = ["DEVIATION", "discrete_normals"]

DEVIATION = 1 << 24  # of the numbers that are drawn: noise has this many steps of the grid
_BITS = 62  # of a random integer
_ROWS = 1 << 18  # drawn at once


def discrete_normals(stream: Stream, count: int) -> Tensor:
    """Returns (count,) integers k with probability ∝ exp(-k² / (2 · DEVIATION²)), as int64 on the CPU."""
    parts, missing = [], count
    while missing > 0:
        rows = min(_ROWS, int(1.5 * missing) + 16)
        found = _laplace(stream, rows)
        # Accepting y with exp(-(|y| - s)² / 2s²) turns exp(-|y| / s) into exp(-y² / 2s²).
        away = (found.abs() - DEVIATION).square()
        kept = found[_chance_of_exp(stream, away, 2 * DEVIATION**2)]
        parts.append(kept[:missing])
        missing -= len(parts[-1])
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _laplace(stream: Stream, count: int) -> Tensor:
    """Returns about count / 2 integers y with probability ∝ exp(-|y| / DEVIATION)."""
    low = _below(stream, count, DEVIATION)
    low = low[_chance_of_exp(stream, low, DEVIATION)]
    high = torch.zeros_like(low)
    running = torch.arange(len(low))
    while len(running):  # the geometric part: exp(-1) for one more
        goes_on = _chance_of_exp(stream, torch.ones_like(running), 1)
        running = running[goes_on]
        high[running] += 1
    size = low + DEVIATION * high
    is_negative = _below(stream, len(size), 2) == 1
    size, is_negative = (t[~(is_negative & (size == 0))] for t in (size, is_negative))
    return torch.where(is_negative, -size, size)


def _chance_of_exp(stream: Stream, over: Tensor, under: int) -> Tensor:
    """Returns booleans that are true with probability exp(-over / under), for integers."""
    result = torch.zeros(len(over), dtype=torch.bool)
    whole, rest = over.div(under, rounding_mode="floor"), over % under
    places = torch.arange(len(over))
    turn = 0
    while len(places):  # exp(-1) for each whole
        is_waiting = whole[places] > turn
        result[places[~is_waiting]] = True
        waiting = places[is_waiting]
        places = waiting[_below_one(stream, torch.full_like(waiting, 1), 1)]
        turn += 1
    chosen = result.nonzero()[:, 0]
    result[chosen] = _below_one(stream, rest[chosen], under)
    return result


def _below_one(stream: Stream, over: Tensor, under: int) -> Tensor:
    """Returns booleans that are true with probability exp(-over / under), for over ≤ under.

    The number of turns in which chances of over / under, over / 2 under, ... all succeed is even.
    """
    turns = torch.zeros_like(over)
    running = torch.arange(len(over))
    k = 1
    while len(running):
        drawn = _below(stream, len(running), under * k)
        running = running[drawn < over[running]]
        turns[running] += 1
        k += 1
    return turns % 2 == 0


def _below(stream: Stream, count: int, bound: int) -> Tensor:
    """Returns uniform integers below a bound: those that would favour small ones are drawn again."""
    drawn = stream.integers(count)
    last = ((1 << _BITS) // bound) * bound
    while len(again := (drawn >= last).nonzero()[:, 0]):
        drawn[again] = stream.integers(len(again))
    return drawn % bound
