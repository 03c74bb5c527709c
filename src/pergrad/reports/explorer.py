"""Prepares the samples for the page's table, which filters, sorts, selects and exports them."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np

from pergrad.reports.pictures import shown
from pergrad.reports.reading import Results

__all__ = ["classes_of", "groups_of", "payload", "script_safe"]

_MOST = 5000  # samples in the page's table; all are in samples.parquet
_EXPLAINED = 1000  # of these, samples with their evidence
_SMALL = 72  # pixels of a picture
_GROUPS, _MEMBERS = 20, 8
_DIGITS = 4


def payload(results: Results) -> dict[str, Any]:
    """Returns the samples to look at first, and outliers and duplicates, as columns of plain values."""
    rows = _rows(results)
    labels = {name: _texts(results, name, rows) for name in ("label", "suggested", "predicted")}
    samples = results.samples
    # A sample that cannot be judged has the least doubt, which says nothing of it.
    is_judged = np.isfinite(samples["label_probability"])
    first = set(results.first_rows().tolist())
    outlying = set(results.outlying().tolist())
    return {
        "index": samples["index"][rows].tolist(),
        "rank": samples["rank"][rows].tolist(),
        **labels,
        **{name: _numbers(samples[name][rows]) for name in _COLUMNS},
        "doubt": _numbers(np.where(is_judged, samples["doubt"], np.nan)[rows]),
        "group": samples["duplicate_group"][rows].tolist(),
        "kinds": [_kinds(results, row, first, outlying) for row in rows.tolist()],
        "why": [results.evidence(row) for row in rows[:_EXPLAINED].tolist()],
        "previews": {
            str(index): _preview(results, index)
            for index in samples["index"][rows].tolist()
            if index in results.shown
        },
        "total": len(results),
        "judged": results.judges_labels,
        "name": str(results.summary.get("dataset", {}).get("name") or "data set"),
    }


_COLUMNS = (
    *("confidence", "label_probability", "predicted_probability"),
    *("loss", "norm", "outlier"),
)


def script_safe(value: Any) -> str:
    """Returns JSON that can stand inside of a script element: no character of HTML is left in it.

    >>> "<" in script_safe("</script>"), json.loads(script_safe("</script>&"))
    (False, '</script>&')
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def classes_of(results: Results) -> list[dict[str, Any]]:
    """Returns a row for each class: how many of its labels are doubted, and towards which class."""
    if not results.judges_labels:
        return []
    given = results.table["label"].to_pylist()
    suggested = results.table["suggested"].to_pylist()
    total = Counter(name for name in given if name is not None)
    wrong = results.first_rows()
    towards: dict[str, Counter[str]] = {}
    for row in wrong.tolist():
        if suggested[row] is not None and suggested[row] != given[row]:
            towards.setdefault(given[row], Counter())[suggested[row]] += 1
    found = []
    for name, size in total.items():
        others = towards.get(name, Counter())
        doubted = sum(others.values())
        found.append(
            {
                "name": name,
                "samples": size,
                "doubted": doubted,
                "share": doubted / size,
                "towards": others.most_common(3),
            }
        )
    return sorted(found, key=lambda row: (-row["doubted"], str(row["name"])))


def groups_of(results: Results) -> list[dict[str, Any]]:
    """Returns the largest groups of near-duplicates with their first members."""
    group = results.samples["duplicate_group"]
    found = []
    for number in range(1, min(_GROUPS, int(group.max(initial=0))) + 1):
        rows = np.flatnonzero(group == number)
        labels = {results.text("label", int(row)) for row in rows}
        found.append(
            {
                "number": number,
                "size": len(rows),
                "members": results.samples["index"][rows[:_MEMBERS]].tolist(),
                "left_out": max(0, len(rows) - _MEMBERS),
                "differ": len(labels) > 1,
            }
        )
    return found


def _rows(results: Results) -> np.ndarray:
    ranked = results.top(_MOST)
    others = [*results.outlying().tolist(), *np.flatnonzero(results.samples["duplicate_group"] > 0)]
    seen = set(ranked.tolist())
    more = [row for row in dict.fromkeys(others) if row not in seen]
    return np.array([*ranked.tolist(), *more[:_MOST]], dtype=np.int64)


def _texts(results: Results, name: str, rows: np.ndarray) -> list[str | None]:
    column = results.table[name].to_pylist()
    return [None if column[row] is None else str(column[row]) for row in rows.tolist()]


def _numbers(values: np.ndarray) -> list[float | None]:
    return [
        float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()
    ]


def _kinds(results: Results, row: int, first: set[int], outlying: set[int]) -> list[str]:
    found = []
    if results.not_finite[row]:
        found.append("not finite")
    elif row in first:
        found.append("label" if results.judges_labels else "loss")
    if row in outlying:
        found.append("outlier")
    if results.samples["duplicate_group"][row] > 0:
        found.append("duplicate")
    return found


def _preview(results: Results, index: int) -> dict[str, Any]:
    made = shown(results.shown[index], size=_SMALL)
    if made.uri is not None:
        return {"uri": made.uri, "pixels": made.has_pixels}
    return {"text": made.excerpt}
