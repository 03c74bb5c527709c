"""Writes the report: one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from pergrad.audit.streaming.files import write_whole
from pergrad.reports.charts import histogram_svg
from pergrad.reports.comparing import compared
from pergrad.reports.explorer import classes_of, groups_of, payload, script_safe
from pergrad.reports.facts import facts
from pergrad.reports.meanings import KINDS, MEANINGS
from pergrad.reports.numbers import batch_size, count, duration, middle_cut, number, share
from pergrad.reports.pictures import Shown, shown
from pergrad.reports.reading import Results, read_results
from pergrad.reports.words import (
    first_count,
    grade_words,
    headline,
    layer_words,
    noise_words,
    size_words,
    suggested_label,
    why_first,
)

__all__ = ["html_of", "write_report"]

_RANKED = 12  # ranked samples shown if the audit stored no pushes
_MOST = 200  # ranked samples; more make the page heavy
_OPEN = 12  # ranked samples above the fold
_TILES = 12  # pictures beside the headline
_LARGE, _SMALL = 224, 96  # pixels of pictures: twice their size on the page


@dataclass(frozen=True)
class _Pushing:
    index: int
    label: str | None
    shown: Shown


@dataclass(frozen=True)
class _Ranked:
    rank: int
    index: int
    label: str | None
    shown: Shown
    evidence: Sequence[str]
    figures: Sequence[tuple[str, str, str]]  # name, value, meaning
    helpers: Sequence[_Pushing]
    harmers: Sequence[_Pushing]
    suggested: str | None
    confidence: str | None


def write_report(folder: str | Path, *, before: str | Path | None = None) -> Path:
    """Writes `report.html` from the results in the folder and returns its path.

    `before` is the folder of an earlier audit of the same data to compare with. The file is written
    atomically and loads nothing: pictures, charts, style and script are inline.
    """
    results = read_results(folder)
    path = results.folder / "report.html"
    earlier = None if before is None else read_results(before)
    write_whole(
        path, html_of(results, before=earlier).encode(errors="backslashreplace"), durable=False
    )
    return path


def html_of(results: Results, *, before: Results | None = None) -> str:
    """Renders the page; all content of the audit is escaped. `before` is an earlier audit to compare with."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_template),
    )
    for filtering in (batch_size, duration, middle_cut, share):
        environment.filters[filtering.__name__] = filtering
    script = _template("report.js") + _template("explorer.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template("report.html").render(
        **_context(results, before),
        number=number,
        count=count,
        style=Markup(_template("report.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _template(name: str) -> str:
    return (resources.files("pergrad.reports") / "templates" / name).read_text(encoding="utf-8")


def _context(results: Results, before: Results | None) -> dict[str, Any]:
    summary, samples = results.summary, results.samples
    first = first_count(results)
    rows = results.top(_shown_count(results))
    marked = results.top(first)
    marks = f"the first {first:,}" if first else "none marked"
    charts = [
        {
            "title": title.capitalize(),
            "words": size_words(results, name, title),
            "svg": Markup(
                histogram_svg(
                    samples[name], samples[name][marked], name=name, title=title, marks=marks
                )
            ),
        }
        for name, title in (("norm", "gradient norm"), ("loss", "loss"))
    ]
    ranked = [_ranked(results, int(row)) for row in rows]
    return {
        "summary": summary,
        "title": str(summary.get("dataset", {}).get("name") or "data set"),
        "headline": headline(results),
        "why_first": why_first(results),
        "first": first,
        "tiles": [row for row in ranked[: min(first, _TILES)] if row.shown.uri],
        "ranked": ranked[:_OPEN],
        "more_ranked": ranked[_OPEN:],
        "charts": charts,
        "marks": marks,
        "dup_groups": _dup_groups(results),
        "group_count": int(summary.get("duplicate_groups") or 0),
        "outlier_count": len(results.outlying()),
        "has_outliers": bool(np.isfinite(samples["outlier"]).any()),
        "judged": results.judges_labels,
        "saturated": bool((summary.get("memorised") or {}).get("is_so")),
        "classes": classes_of(results),
        "kinds": KINDS[results.judges_labels],
        "meanings": MEANINGS,
        "comparison": None if before is None else compared(before, results),
        "payload": Markup(script_safe(payload(results))),
        "pair_count": int(summary.get("duplicates") or 0),
        "groups": _groups(summary),
        "layer_words": layer_words(summary.get("groups") or []),
        "noise_words": noise_words(summary),
        "batches": _batches(summary.get("noise_scale")),
        "grade": summary.get("grade"),
        "grade_words": grade_words(summary.get("grade"), by_labels=results.judges_labels),
        "facts": facts(summary),
        "notes": summary.get("notes") or [],
        "has_pushes": any(row.helpers or row.harmers for row in ranked),
        "total_seconds": sum((summary.get("seconds") or {}).values()),
    }


def _shown_count(results: Results) -> int:
    """Returns how many samples to show: those with stored pushes, and those that are not finite."""
    pushed = len(np.unique(results.pushes["index"]))
    not_finite = int(results.not_finite.sum())
    return min(pushed + not_finite, _MOST) if pushed else _RANKED


def _ranked(results: Results, row: int) -> _Ranked:
    samples = results.samples
    index = int(samples["index"][row])
    helpers, harmers = results.pushed(index)
    figures = [
        (name, write(float(samples[column][row])), MEANINGS[column])
        for name, column, write in _FIGURES
    ]
    return _Ranked(
        int(samples["rank"][row]),
        index,
        results.label(index),
        shown(results.shown.get(index), size=_LARGE),
        results.evidence(row),
        figures,
        [_pushing(results, other) for other in helpers],
        [_pushing(results, other) for other in harmers],
        *_suggestion(results, row, index),
    )


def _suggestion(results: Results, row: int, index: int) -> tuple[str | None, str | None]:
    """Returns the label that the other samples suggest, if it is another one, and its probability."""
    suggested, confidence = suggested_label(results, index), results.samples["confidence"][row]
    is_known = suggested is not None and np.isfinite(confidence)
    return suggested, share(float(confidence)) if is_known else None


def _pushing(results: Results, index: int) -> _Pushing:
    return _Pushing(index, results.label(index), shown(results.shown.get(index), size=_SMALL))


def _cosine(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−") if np.isfinite(value) else "not finite"


_FIGURES = (
    ("loss", "loss", number),
    ("gradient norm", "norm", number),
    ("self-influence", "self_influence", number),
    ("alignment", "alignment", _cosine),
)


def _dup_groups(results: Results) -> list[dict[str, Any]]:
    return [
        {**group, "samples": [_pushing(results, index) for index in group["members"]]}
        for group in groups_of(results)
    ]


def _groups(summary: Any) -> list[dict[str, Any]]:
    groups = summary.get("groups") or []
    total = sum(group["parameters"] for group in groups) or 1
    return [{**group, "part": group["parameters"] / total} for group in groups]


def _batches(scale: float | None) -> list[dict[str, Any]]:
    """Returns costs of batch sizes B around the noise scale N: steps 1 + N / B, samples 1 + B / N."""
    if scale is None or scale <= 0:
        return []
    middle = max(0, round(np.log2(max(scale, 1.0))))
    sizes = [2**power for power in range(max(0, middle - 4), middle + 5, 2)]
    return [
        {"size": size, "steps": f"{1 + scale / size:.2f}", "samples": f"{1 + size / scale:.2f}"}
        for size in sizes
    ]
