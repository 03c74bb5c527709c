"""Reads and checks a results folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pergrad.attribution import holding_half
from pergrad.audit.writing.results import FORMAT
from pergrad.errors import AuditError

__all__ = ["Results", "read_results"]

_NEEDED = ("doubt", "suggested", "outlier", "duplicate_group")
_SAMPLES = ("index", "loss", "norm", "alignment", "self_influence", "suspicion", "rank", "evidence")
_NUMBERS = ("doubt", "confidence", "label_probability", "predicted_probability", "outlier")
_ALIKE = 0.01  # of the median, a difference that tells nothing
_TURNING = dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)])  # of direction
_FEW = 0.2  # a list of more than this share of the data is not short
_FAR = 5.0  # interquartile ranges above the median beyond which an input is an outlier
_DUPLICATES = ("index_a", "index_b", "cosine")
_PUSHES = ("index", "other", "cosine")
_SHOWN = ("index", "text", "mode", "width", "height", "pixels")


@dataclass(frozen=True)
class Results:
    """Results of an audit: a summary, and columns with one entry per sample, in order of `index`."""

    folder: Path
    summary: Mapping[str, Any]
    samples: Mapping[str, np.ndarray]  # columns `_SAMPLES` but evidence, and `_NUMBERS`
    duplicates: Mapping[str, np.ndarray]  # index_a, index_b, cosine
    pushes: Mapping[str, np.ndarray]  # index, other, cosine
    table: pa.Table  # samples.parquet, for columns that are read for few rows: evidence and label
    shown: Mapping[int, Mapping[str, Any]]  # index -> row of shown.parquet

    def __len__(self) -> int:
        return len(self.samples["index"])

    def top(self, count: int) -> np.ndarray:
        """Returns the rows of the `count` most suspicious samples, the most suspicious first."""
        return np.argsort(self.samples["rank"], kind="stable")[:count]

    def row_of(self, index: int) -> int | None:
        """Returns the row of the sample with that index in the data set."""
        row = int(np.searchsorted(self.samples["index"], index))
        return row if row < len(self) and self.samples["index"][row] == index else None

    def label(self, index: int) -> str | None:
        row = self.row_of(index)
        if row is None or "label" not in self.table.column_names:
            return None
        label = self.table["label"][row].as_py()
        return None if label is None else str(label)

    @property
    def judges_labels(self) -> bool:
        """Whether samples rank by doubts about their labels, not by the loss."""
        return self.summary.get("ranked_by") == "labels"

    @cached_property
    def not_finite(self) -> np.ndarray:  # (n,) bool
        return ~(np.isfinite(self.samples["loss"]) & np.isfinite(self.samples["suspicion"]))

    @property
    def expected(self) -> int | None:
        """Returns the number of labels expected to be wrong; None if it is not estimated."""
        return (self.summary.get("label_errors") or {}).get("expected")

    def text(self, column: str, row: int) -> str | None:
        """Returns an entry of a column of strings: label, suggested or predicted."""
        value = self.table[column][row].as_py()
        return None if value is None else str(value)

    def first_rows(self) -> np.ndarray:
        """Returns the rows to look at first.

        Samples that are not finite, then the labels expected to be wrong, or else half of all suspicion.
        """
        broken = int(self.not_finite.sum())
        if self.judges_labels:
            return self.top(broken + (self.expected or 0))
        held = holding_half(self.samples["suspicion"])
        return self.top(held if held <= max(1, _FEW * len(self)) else broken)

    def issues(self) -> pa.Table:
        """Returns a row for each finding about a sample, by kind, the highest score first."""
        rows: list[tuple[int, str, float]] = []
        score = self.samples["doubt" if self.judges_labels else "suspicion"]
        for row in self.first_rows().tolist():
            kind = "label" if self.judges_labels else "loss"
            rows.append((row, "not finite" if self.not_finite[row] else kind, float(score[row])))
        outlier = self.samples["outlier"]
        for row in self.outlying().tolist():
            rows.append((row, "outlier", float(outlier[row])))
        found = [row for row, _, _ in rows]
        why = ["; ".join(self.evidence(row)) for row in found]
        cosine = self._closest()
        for number, members in self.groups().items():
            indices = self.samples["index"][members].tolist()
            labels = ", labels differ" if self.labels_differ(members) else ""
            for row in members.tolist():
                others = [f"{n}" for n in indices if n != self.samples["index"][row]]
                named = ", ".join(others[:5]) + (", ..." if others[5:] else "")
                rows.append((row, "duplicate", cosine.get(row, np.nan)))
                why.append(f"to the model the same as {named} (group {number}{labels})")
        found = [row for row, _, _ in rows]
        table = self.table
        return pa.table(
            {
                "index": self.samples["index"][found],
                "kind": pa.array([kind for _, kind, _ in rows], pa.string()),
                "score": pa.array([score for _, _, score in rows], pa.float64()),
                "label": table["label"].take(pa.array(found, pa.int64())),
                "suggested": table["suggested"].take(pa.array(found, pa.int64())),
                "confidence": table["confidence"].take(pa.array(found, pa.int64())),
                "why": pa.array(why, pa.string()),
            }
        )

    def groups(self) -> dict[int, np.ndarray]:
        """Returns the rows of each group of near-duplicates, by its number."""
        group = self.samples["duplicate_group"]
        order = np.argsort(group, kind="stable")
        order = order[group[order] > 0]
        numbers, starts = np.unique(group[order], return_index=True)
        parts = np.split(order, starts[1:])
        return {int(number): part for number, part in zip(numbers, parts, strict=False)}

    def labels_differ(self, rows: np.ndarray) -> bool:
        """Whether the rows have more than one label."""
        return bool((self._label_codes[rows] != self._label_codes[rows[0]]).any())

    @cached_property
    def _label_codes(self) -> np.ndarray:  # (n,) int, equal for equal labels
        if "label" not in self.table.column_names:
            return np.zeros(len(self), dtype=np.int64)
        labels = self.table["label"].combine_chunks().dictionary_encode().indices
        return np.asarray(labels.fill_null(-1))

    def _closest(self) -> dict[int, float]:
        """Returns the cosine of each row with its nearest duplicate, of the pairs that are stored."""
        found: dict[int, float] = {}
        for side in ("index_a", "index_b"):
            rows = np.searchsorted(self.samples["index"], self.duplicates[side])
            for row, cosine in zip(rows.tolist(), self.duplicates["cosine"].tolist(), strict=True):
                found[row] = max(cosine, found.get(row, -1.0))
        return found

    def outlying(self, most: int = 100) -> np.ndarray:
        """Returns the rows whose label-free self-influence is far above the usual, the highest first."""
        values = self.samples["outlier"]
        known = values[np.isfinite(values)]
        if len(known) < 8:
            return np.empty(0, dtype=np.int64)
        low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
        # Where nearly all inputs are alike, rounding alone makes some differ.
        far = middle + _FAR * max(high - low, _ALIKE * abs(middle), 1e-12)
        order = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")[:most]
        return order[values[order] > far]

    def evidence(self, row: int) -> list[str]:
        """Returns why a sample stands out; names in it must not turn the words around them."""
        return [
            str(words).translate(_TURNING) for words in self.table["evidence"][row].as_py() or []
        ]

    def pushed(self, index: int) -> tuple[list[int], list[int]]:
        """Returns the samples that push a sample towards its label, and away from it, the strongest first."""
        rows = np.flatnonzero(self.pushes["index"] == index)
        others, cosines = self.pushes["other"][rows], self.pushes["cosine"][rows]
        order = np.argsort(-np.abs(cosines), kind="stable")
        helpers = [int(others[n]) for n in order if cosines[n] > 0]
        harmers = [int(others[n]) for n in order if cosines[n] < 0]
        return helpers, harmers


def read_results(folder: str | Path) -> Results:
    """Reads the results of a finished audit; refuses an unfinished or damaged one.

    `pushes.parquet` and `shown.parquet` may be missing: then there are no pushes or no previews.
    """
    path = Path(folder)
    if not path.is_dir():
        raise AuditError(
            f"no results folder {path}: run `pergrad audit` with --output {path} first"
        )
    summary = _summary(path / "summary.json")
    table = _table(path / "samples.parquet", (*_SAMPLES, *_NEEDED, *_NUMBERS))
    if table.num_rows == 0:
        raise AuditError(f"{path / 'samples.parquet'} has no rows: audit at least one sample")
    columns = [name for name in _SAMPLES if name != "evidence"]
    duplicates = _table(path / "duplicates.parquet", _DUPLICATES)
    pushes = {name: np.empty(0) for name in _PUSHES}
    if (path / "pushes.parquet").exists():
        pushes = _columns(_table(path / "pushes.parquet", _PUSHES), _PUSHES)
    samples = _columns(table, [*columns, *_NUMBERS, "duplicate_group"])
    shown: list[dict[str, Any]] = []
    if (path / "shown.parquet").exists():
        shown = _table(path / "shown.parquet", _SHOWN).to_pylist()
    return Results(
        path,
        summary,
        samples,
        _columns(duplicates, _DUPLICATES),
        pushes,
        table,
        shown={row["index"]: row for row in shown},
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AuditError(
            f"{path.parent} holds no finished audit: {path.name} is missing; finish the audit first"
        ) from error
    except (OSError, ValueError) as error:
        raise AuditError(f"cannot read {path} ({error}): run the audit again") from error
    if not isinstance(summary, dict) or summary.get("format") != FORMAT:
        found = summary.get("format") if isinstance(summary, dict) else None
        raise AuditError(
            f"{path} has format {found!r}, this version of pergrad reads {FORMAT}: run the audit again, "
            "or use the version that wrote it"
        )
    return summary


def _table(path: Path, columns: tuple[str, ...]) -> pa.Table:
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise AuditError(f"{path} is missing: run the audit again") from error
    except (OSError, pa.ArrowException) as error:
        raise AuditError(f"cannot read {path} ({error}): run the audit again") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise AuditError(
            f"{path} has no column {missing[0]!r}: it was not written by an audit; run the audit again"
        )
    return table


def _columns(table: pa.Table, names: Any) -> dict[str, np.ndarray]:
    # Nulls become NaN: a writer may store numbers that are not finite as nulls.
    return {name: _column(table[name]) for name in names}


def _column(column: pa.ChunkedArray) -> np.ndarray:
    values = column.to_numpy()
    return values.astype(np.float64) if values.dtype == object else values
