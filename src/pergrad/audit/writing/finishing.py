"""Finishes an audit: analyses all rows and writes tables, previews and the summary."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import pergrad
from pergrad.attribution import Findings, Samples, analyse, grade
from pergrad.audit.streaming.chunks import Chunk, Span, read_all
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.streaming.task import Task
from pergrad.audit.writing.results import write_previews, write_summary, write_tables
from pergrad.errors import PergradError

__all__ = ["finish"]


def finish(
    results: ResultsFolder,
    task: Task,
    ranks: Ranks,
    command: str | None,
    own: Mapping[Span, Chunk],
) -> None:
    """Analyses all rows and writes the results, the summary last."""
    began = time.perf_counter()
    whole, batch_sizes = read_all(results.chunks, task.indices, own)
    rows = whole.rows
    samples = Samples(
        whole.index,
        rows.loss,
        rows.norm,
        dict(zip(task.groups, np.ascontiguousarray(rows.group_norms.T), strict=True)),
        rows.sketch,
    )
    findings = analyse(samples, top=task.options.shown)
    analysed = time.perf_counter()
    write_tables(results.path, samples, findings, whole.labels)
    shown = findings.worth_showing(top=task.options.shown)
    notes = write_previews(results.path, task.spec, shown)
    written = time.perf_counter()
    spent = dict(whole.seconds)
    # Wall time of loading and gradients, which overlap when workers load.
    streaming = spent.pop("streaming")
    notes += _notes(task, batch_sizes)
    summary = {
        **_how(task, ranks, min(batch_sizes), command),
        **_what(task, samples, findings),
        "seconds": {**spent, "analysis": analysed - began, "writing": written - analysed},
        "samples_per_second": len(samples) * ranks.count / streaming,
        "batch_sizes": batch_sizes,
    }
    certificate = (results.open() or {}).get("certificate", {"ok": False, "reason": "an old audit"})
    summary["certificate"] = certificate
    if not certificate["ok"]:
        notes.append(f"the gradients of this audit are not certified: {certificate['reason']}")
    try:
        if task.spec.known_wrong is not None:
            known = task.spec.known_wrong
            graded = grade(samples.index, findings.suspicion, samples.loss, known)
            summary["grade"] = graded.as_json()
    except PergradError as error:
        notes.append(f"no grade: {error}")
    write_summary(results.path, {**summary, "notes": notes})


def _how(task: Task, ranks: Ranks, batch_size: int, command: str | None) -> dict[str, Any]:
    is_gpu = task.device.type == "cuda"
    return {
        "format": 2,
        "pergrad": pergrad.__version__,
        "torch": torch.version.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(task.device) if is_gpu else task.device.type,
        "threads": torch.get_num_threads(),
        "processes": ranks.count,
        "dtype": task.identity["dtype"],
        "seed": task.options.seed,
        "sketch_dim": task.options.sketch_dim,
        "batch_size": batch_size,
        "command": command,
    }


def _what(task: Task, samples: Samples, findings: Findings) -> dict[str, Any]:
    model, spec = task.spec.model, task.spec
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    noise = findings.noise
    return {
        "samples": len(samples),
        "model": {
            "name": type(model).__name__,
            "parameters": sum(sizes.values()),
            "fingerprint": task.model_fingerprint,
        },
        "dataset": {
            "name": spec.title,
            "size": len(spec.dataset),
            "fingerprint": task.data_fingerprint,
            "subset": task.options.subset,
        },
        "groups": [
            {
                "name": group,
                "parameters": sum(sizes[name] for name in task.groups[group]),
                "share": share,
            }
            for group, share in findings.dominant_groups.items()
        ],
        "norm": findings.quantiles["norm"],
        "loss": findings.quantiles["loss"],
        "noise_scale": findings.noise_scale,
        "critical_batch_size": findings.critical_batch_size,
        "noise": {
            "trace": noise.trace,
            "squared_mean": noise.squared_mean,
            "low": noise.low,
            "high": noise.high,
        },
        "duplicates": findings.duplicates.count,
    }


def _notes(task: Task, batch_sizes: dict[int, int]) -> list[str]:
    notes = []
    if len(batch_sizes) > 1:
        parts = ", ".join(
            f"{rows} samples in batches of {size}" for size, rows in batch_sizes.items()
        )
        notes.append(
            f"memory ran out during the audit: {parts}; the batch size may change the last digits"
        )
    if not task.data_repeats:
        notes.append(
            "items of the data set change each time they are read: its fingerprint covers only its type and "
            "length, and the previews may differ from the samples that were audited"
        )
    return notes
