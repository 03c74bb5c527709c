"""Holds the result of an evaluation: a number for each method, query and seed, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from pergrad.errors import EvaluationError
from pergrad.evaluate.task import Floats

__all__ = ["Estimate", "Evaluation"]

_RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean, its bootstrap interval, and the mean of each seed."""

    mean: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @property
    def half_width(self) -> float:
        """Returns half of the length of the interval."""
        return (self.high - self.low) / 2

    def __repr__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found, method by method; prints as a table.

    Args:
        name: what is measured, such as "LDS".
        values: for each method the (seeds, queries) numbers; greater is better.
        about: the setting, such as the number of subsets.
        notes: what a reader should know, such as a method with the wrong sign.
        paired: whether query k is the same for all seeds, so that whole queries are drawn by the bootstrap.
        confidence: of the intervals.

    Intervals are percentiles of 2,000 bootstrap means over queries. They say how the mean would move with
    other queries, not with other training runs: look at `by_seed` for that.
    """

    name: str
    values: Mapping[str, Floats]
    about: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    paired: bool = True
    confidence: float = 0.95

    def __getitem__(self, method: str) -> Estimate:
        found = self._of(method)
        low, high = self._interval(found)
        return Estimate(float(found.mean()), low, high, tuple(map(float, found.mean(1))))

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def difference(self, method: str, other: str) -> Estimate:
        """Returns `method` minus `other`, query by query: its interval is narrower than theirs."""
        found = self._of(method) - self._of(other)
        low, high = self._interval(found)
        return Estimate(float(found.mean()), low, high, tuple(map(float, found.mean(1))))

    @property
    def frame(self) -> Any:
        """Returns a pandas data frame with a row for each method, the best first."""
        try:
            import pandas  # noqa: PLC0415  # an extra
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tables of an evaluation need pandas: pip install 'pergrad[evaluate]'",
                name="pandas",
            ) from error
        return pandas.DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Returns a dict for each method, the best first."""
        found = {method: self[method] for method in self.values}
        return [
            {
                "method": method,
                self.name: estimate.mean,
                "low": estimate.low,
                "high": estimate.high,
                "seeds": list(estimate.by_seed),
            }
            for method, estimate in sorted(found.items(), key=lambda pair: -pair[1].mean)
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns plain dicts, lists and numbers."""
        return {
            "name": self.name,
            "about": dict(self.about),
            "notes": list(self.notes),
            "confidence": self.confidence,
            "rows": self.rows(),
        }

    def __repr__(self) -> str:
        rows = self.rows()
        width = max([len(row["method"]) for row in rows] + [len("method")])
        percent = f"{self.confidence:.0%} interval"
        lines = [f"{'method':<{width}}  {self.name:>8}  {percent:<16}  by seed"]
        for row in rows:
            seeds = " ".join(f"{value:.3f}" for value in row["seeds"])
            interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
            lines.append(
                f"{row['method']:<{width}}  {row[self.name]:>8.3f}  {interval:<16}  {seeds}"
            )
        about = ", ".join(f"{value} {name}" for name, value in self.about.items())
        return "\n".join([*lines, *([about] if about else []), *(f"note: {n}" for n in self.notes)])

    def _of(self, method: str) -> Floats:
        if method not in self.values:
            raise EvaluationError(
                f"no method {method!r} was evaluated; there are {', '.join(map(repr, self.values))}"
            )
        return self.values[method]

    def _interval(self, found: Floats) -> tuple[float, float]:
        units = found.mean(0) if self.paired else found.ravel()
        if len(units) < 2 or np.ptp(units) == 0:
            return (float("nan"),) * 2 if len(units) < 2 else (float(units[0]),) * 2
        drawn = bootstrap(
            (units,),
            np.mean,
            n_resamples=_RESAMPLES,
            confidence_level=self.confidence,
            method="percentile",
            rng=np.random.default_rng(0),
        )
        return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)
