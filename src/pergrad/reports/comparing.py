"""Compares two audits of the same data, such as before and after labels were changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from pergrad.errors import AuditError
from pergrad.reports.numbers import count
from pergrad.reports.reading import Results

__all__ = ["compared"]

_LISTED = 200


def compared(before: Results, after: Results) -> dict[str, Any]:
    """Returns what has changed: labels, and samples to look at first that are gone or new.

    Samples are matched by their index in the data set.
    """
    common = np.intersect1d(before.samples["index"], after.samples["index"])
    if len(common) == 0:
        raise AuditError(
            f"{before.folder} and {after.folder} have no sample in common: compare audits of the same data"
        )
    then, now = (_first(results) for results in (before, after))
    changed = []
    for index in common.tolist():
        was, new = before.label(index), after.label(index)
        if was != new:
            changed.append({"index": index, "before": was, "after": new})
    gone = sorted(then - now)
    new_ones = sorted(now - then)
    sizes = [results.summary.get("dataset", {}).get("size") for results in (before, after)]
    return {
        "words": [
            *_words_of_sizes(*sizes),
            f"{count(len(changed), 'label has', 'labels have')} changed between the two audits.",
            f"To look at first: {len(then):,} before, {len(now):,} now; {len(gone):,} are settled, "
            f"{len(new_ones):,} are new.",
        ],
        "before": _facts(before),
        "after": _facts(after),
        "changed": changed[:_LISTED],
        "left_out": max(0, len(changed) - _LISTED),
        "gone": gone[:_LISTED],
        "new": new_ones[:_LISTED],
    }


def _words_of_sizes(then: int | None, now: int | None) -> list[str]:
    """Warns where samples have been taken out or added, which may give the others another index."""
    if then is None or now is None or then == now:
        return []
    return [
        f"The data set had {then:,} samples and now has {now:,}: samples are compared by their index, and "
        "those after one that was taken out have another one now."
    ]


def _first(results: Results) -> set[int]:
    return set(results.samples["index"][results.first_rows()].tolist())


def _facts(results: Results) -> dict[str, Any]:
    loss = results.samples["loss"]
    known = loss[np.isfinite(loss)]
    return {
        "folder": str(results.folder),
        "samples": len(results),
        "first": len(results.first_rows()),
        "groups": int(results.summary.get("duplicate_groups") or 0),
        "loss": float(known.mean()) if len(known) else None,
    }
