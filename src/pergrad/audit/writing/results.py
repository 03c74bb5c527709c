"""Writes the results: Parquet tables for pandas or DuckDB, and a JSON summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pergrad.attribution import Findings, Samples
from pergrad.audit.streaming.files import replacing, write_whole
from pergrad.audit.subject.inferring.showing import inferred_show
from pergrad.audit.subject.spec import Spec
from pergrad.audit.subject.texts import as_text
from pergrad.audit.writing.previews import preview_table

__all__ = ["FORMAT", "sample_table", "write_previews", "write_summary", "write_tables"]

FORMAT = 3  # of summary.json and the tables; 2 had no columns of labels


def sample_table(
    samples: Samples,
    findings: Findings,
    labels: Sequence[str | None] | None,
    names: Mapping[int, str] | None = None,
) -> pa.Table:
    """Returns one row per sample, in order of `index`; what was not computed is null."""
    text, texts = pa.string(), pa.list_(pa.string())
    columns: dict[str, Any] = {"index": samples.index, "loss": samples.loss, "norm": samples.norm}
    columns |= {f"norm/{group}": norms for group, norms in samples.group_norms.items()}
    columns |= {
        "alignment": findings.alignment,
        "self_influence": findings.self_influence,
        "suspicion": findings.suspicion,
        **_label_columns(samples, findings, names or {}),
        "outlier": _or_nulls(findings.outlier, len(samples)),
        "duplicate_group": findings.duplicates.group,
        "rank": findings.rank,
        "evidence": pa.array(findings.evidence, type=texts),
        "label": pa.array(labels, type=text) if labels else pa.nulls(len(samples), text),
    }
    return pa.table(columns)


def _label_columns(
    samples: Samples, findings: Findings, names: Mapping[int, str]
) -> dict[str, Any]:
    """Returns what the other samples say of each label, and what the model itself predicts."""
    found, size = findings.labels, len(samples)

    def named(classes: np.ndarray | None) -> pa.Array:
        if classes is None:
            return pa.nulls(size, pa.string())
        of = {int(n): names.get(int(n), str(n)) for n in np.unique(classes)}
        return pa.array([of[n] if n >= 0 else None for n in classes.tolist()], pa.string())

    chances = samples.probability
    predicted = samples.predicted
    if predicted is not None and chances is not None:  # logits that are not finite predict nothing
        predicted = np.where(np.isfinite(chances[:, 1]), predicted, -1)
    return {
        "doubt": _or_nulls(None if found is None else found.doubt, size),
        "suggested": named(None if found is None else found.suggested),
        "confidence": _or_nulls(None if found is None else found.confidence, size),
        "label_probability": _or_nulls(None if found is None else found.own, size),
        "predicted": named(predicted),
        "predicted_probability": _or_nulls(None if chances is None else chances[:, 1], size),
        "model_probability": _or_nulls(None if chances is None else chances[:, 0], size),
    }


def _or_nulls(values: np.ndarray | None, size: int) -> pa.Array:
    if values is None:
        return pa.nulls(size, pa.float64())
    return pa.array(np.ascontiguousarray(values, dtype=np.float64))


def write_tables(
    folder: Path,
    samples: Samples,
    findings: Findings,
    labels: Sequence[str | None] | None,
    names: Mapping[int, str] | None = None,
) -> None:
    """Writes `samples.parquet`, `duplicates.parquet` and `pushes.parquet`."""
    pairs, pushes = findings.duplicates, findings.pushes
    tables = {
        "samples": sample_table(samples, findings, labels, names),
        "duplicates": pa.table(
            {"index_a": pairs.index_a, "index_b": pairs.index_b, "cosine": pairs.cosine}
        ),
        "pushes": pa.table(
            {
                "index": pushes.index,
                "other": pushes.other,
                "dot": pushes.dot,
                "cosine": pushes.cosine,
            }
        ),
    }
    for name, table in tables.items():
        _write(folder / f"{name}.parquet", table)


def write_previews(folder: Path, spec: Spec, indices: Iterable[int]) -> list[str]:
    """Writes `shown.parquet`; returns a note per sample without a preview.

    If the spec has no `show`, one is inferred from the items; there is no file if none can be.
    """
    path = folder / "shown.parquet"
    show = spec.show or inferred_show(spec.dataset)
    if show is None:
        path.unlink(missing_ok=True)
        return []
    table, problems = preview_table(spec.dataset, show, indices)
    _write(path, table)
    return problems


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json`, the last file of an audit; numbers that are not finite become null."""
    text = json.dumps(_plain(summary), indent=2, allow_nan=False)
    write_whole(folder / "summary.json", f"{text}\n".encode())


def _write(path: Path, table: pa.Table) -> None:
    with replacing(path) as unfinished:
        # Dictionary encoding of numbers that hardly repeat costs time and space.
        pq.write_table(
            table, unfinished, use_dictionary=["label", "suggested", "predicted", "mode"]
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return as_text(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
