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
from pergrad.audit.subject.spec import Spec
from pergrad.audit.writing.previews import preview_table

__all__ = ["sample_table", "write_previews", "write_summary", "write_tables"]


def sample_table(samples: Samples, findings: Findings, labels: Sequence[str] | None) -> pa.Table:
    """Returns one row per sample, in order of `index`."""
    text, texts = pa.string(), pa.list_(pa.string())
    columns: dict[str, Any] = {"index": samples.index, "loss": samples.loss, "norm": samples.norm}
    columns |= {f"norm/{group}": norms for group, norms in samples.group_norms.items()}
    columns |= {
        "alignment": findings.alignment,
        "self_influence": findings.self_influence,
        "suspicion": findings.suspicion,
        "rank": findings.rank,
        "evidence": pa.array(findings.evidence, type=texts),
        "label": pa.array(labels, type=text) if labels else pa.nulls(len(samples), text),
    }
    return pa.table(columns)


def write_tables(
    folder: Path, samples: Samples, findings: Findings, labels: Sequence[str] | None
) -> None:
    """Writes `samples.parquet`, `duplicates.parquet` and `pushes.parquet`."""
    pairs, pushes = findings.duplicates, findings.pushes
    tables = {
        "samples": sample_table(samples, findings, labels),
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
    """Writes `shown.parquet` if the spec has `show`; returns a note per sample without a preview."""
    if spec.show is None:
        return []
    table, problems = preview_table(spec, indices)
    _write(folder / "shown.parquet", table)
    return problems


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json`, the last file of an audit; numbers that are not finite become null."""
    text = json.dumps(_plain(summary), indent=2, allow_nan=False)
    write_whole(folder / "summary.json", f"{text}\n".encode())


def _write(path: Path, table: pa.Table) -> None:
    with replacing(path) as unfinished:
        # Dictionary encoding of numbers that hardly repeat costs time and space.
        pq.write_table(table, unfinished, use_dictionary=["label", "mode"])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
