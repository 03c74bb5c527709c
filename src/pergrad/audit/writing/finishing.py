"""Finishes an audit: analyses all rows and writes tables, previews and the summary."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import pergrad
from pergrad.attribution import Findings, Samples, analyse, grade
from pergrad.audit.streaming.chunks import Chunk, Span
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.streaming.task import Task
from pergrad.audit.subject.checks import notes_of_mode
from pergrad.audit.subject.sharding import name_of
from pergrad.audit.subject.texts import as_text
from pergrad.audit.writing.joining import read_all
from pergrad.audit.writing.results import FORMAT, write_previews, write_summary, write_tables
from pergrad.errors import AuditError, PergradError

__all__ = ["finish"]


def finish(
    results: ResultsFolder,
    task: Task,
    ranks: Ranks,
    command: str | None,
    own: Mapping[Span, Chunk],
    *,
    before: Mapping[str, Any] | None = None,
) -> None:
    """Analyses all rows and writes the results, the summary last.

    `before` is the summary of a finished audit whose tables are made again.
    """
    began = time.perf_counter()
    whole, batch_sizes = read_all(results.chunks, task.indices, own)
    if len(whole.rows) == 0:
        why = next(iter(whole.skipped.values()))
        raise AuditError(f"none of the {len(whole.skipped):,} items can be read: {why}")
    classes, labels = _classes(task, whole, before)
    samples = _samples(task, whole, classes.target)
    findings = analyse(
        samples,
        top=task.options.shown,
        duplicate_cosine=task.options.duplicates,
        names=classes.names,
    )
    analysed = time.perf_counter()
    write_tables(results.path, samples, findings, labels, classes.names)
    shown = findings.worth_showing(top=task.options.shown)
    notes = write_previews(results.path, task.spec, shown)
    written = time.perf_counter()
    spent = dict(whole.seconds)
    # Wall time of loading and gradients, which overlap when workers load.
    streaming = spent.pop("streaming")
    notes += _notes(task, batch_sizes)
    notes += _notes_of_labels(task, samples, findings, classes)
    recall = findings.duplicates.recall
    if recall is not None:
        notes.append(f"near-duplicates were searched in buckets, not among all pairs: {recall}")
    if before is not None:
        ranks = Ranks(count=int(before.get("processes") or 1))
    summary = {
        **_how(task, ranks, min(batch_sizes), command),
        **_what(task, samples, findings, classes),
        "seconds": {**spent, "analysis": analysed - began, "writing": written - analysed},
        "samples_per_second": len(samples) * ranks.count / streaming,
        "batch_sizes": batch_sizes,
        "skipped": [{"index": n, "why": why} for n, why in sorted(whole.skipped.items())],
        "presentation": task.presentation,
    }
    about = results.open() or {}
    certificate = about.get("certificate", {"ok": False, "reason": "an old audit"})
    notes += [note for note in about.get("notes", ()) if note not in notes]
    summary["certificate"] = certificate
    summary["fallback"] = results.fallback
    if results.fallback is not None:
        notes.append(f"the gradients were computed sample by sample: {results.fallback}")
    if not certificate["ok"]:
        notes.append(f"the gradients of this audit are not certified: {certificate['reason']}")
    try:
        if task.spec.known_wrong is not None:
            known = task.spec.known_wrong
            outside = sorted({int(n) for n in known if not 0 <= int(n) < len(task.spec.dataset)})
            if outside:
                notes.append(
                    f"known_wrong has {outside[0]}, but the data set ends at {len(task.spec.dataset) - 1}: "
                    f"{len(outside):,} of its {len(known):,} indices are left out"
                )
            score = findings.suspicion if findings.labels is None else findings.labels.doubt
            score = np.where(samples.usable, score, np.inf)
            graded = grade(samples.index, score, samples.loss, known)
            summary["grade"] = graded.as_json()
    except PergradError as error:
        notes.append(f"no grade: {error}")
    write_summary(results.path, {**summary, "notes": notes})


def _samples(task: Task, whole: Chunk, target: np.ndarray | None) -> Samples:
    rows = whole.rows
    return Samples(
        whole.index,
        rows.loss,
        rows.norm,
        dict(zip(task.groups, np.ascontiguousarray(rows.group_norms.T), strict=True)),
        rows.sketch,
        rows.free,
        target,
        rows.predicted,
        rows.probability,
    )


@dataclass(frozen=True)
class _Classes:
    """The class of each label, from the spec's target or else from its labels, and the names of classes."""

    target: np.ndarray | None
    names: dict[int, str]


def _classes(
    task: Task, whole: Chunk, before: Mapping[str, Any] | None
) -> tuple[_Classes, Sequence[str | None] | None]:
    """Returns the classes and the labels, read again if another `label` was given since the audit ran."""
    labels, target = whole.labels, whole.rows.target
    spec = task.spec
    was = (before or {}).get("presentation") or {}
    if before is not None and was.get("label") != task.presentation["label"]:
        labels = None
        if spec.label is not None:
            loader = Loader(spec, task.indices, task.options.seed)
            labels = loader.labels_of(whole.index.tolist())
    if target is None and labels is not None and whole.rows.free is not None:
        names = sorted(set(labels))
        number = {name: n for n, name in enumerate(names)}
        target = np.array([number[label] for label in labels], dtype=np.int64)
        return _Classes(target, dict(enumerate(names))), labels
    if target is None:
        return _Classes(None, {}), labels
    if labels is None:
        known = {int(n): str(n) for n in np.unique(target[target >= 0])}
        if spec.classes is not None:
            known |= {n: as_text(name) for n, name in enumerate(spec.classes)}
        named = [known.get(int(n), str(n)) if n >= 0 else None for n in target]
        return _Classes(target, known), named
    # The most common label of each class; of two as common, the first.
    counts = Counter(zip(target.tolist(), labels, strict=True))
    names_of: dict[int, str] = {}
    for (number_, label), count in counts.items():
        if number_ not in names_of or count > counts[number_, names_of[number_]]:
            names_of[number_] = label
    return _Classes(target, names_of), labels


def _how(task: Task, ranks: Ranks, batch_size: int, command: str | None) -> dict[str, Any]:
    is_gpu = task.device.type == "cuda"
    return {
        "format": FORMAT,
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


def _what(task: Task, samples: Samples, findings: Findings, classes: _Classes) -> dict[str, Any]:
    model, spec = task.spec.model, task.spec
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    noise, recall = findings.noise, findings.duplicates.recall
    return {
        "samples": len(samples),
        "model": {
            "name": name_of(model),
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
        "duplicates_recall": None if recall is None else recall.as_json(),
        "duplicate_groups": int(findings.duplicates.group.max(initial=0)),
        "ranked_by": "loss" if findings.labels is None else "labels",
        "label_errors": _counts(findings),
        "memorised": _memorised(findings),
        "checkpoints": len(task.checkpoints),
        "classes": len(classes.names),
    }


def _counts(findings: Findings) -> dict[str, Any] | None:
    labels = findings.labels
    if labels is None:
        return None
    return {
        "expected": labels.expected,
        "low": labels.low,
        "high": labels.high,
        "doubted": int(labels.doubted.sum()),
        "skill": labels.skill,
    }


def _memorised(findings: Findings) -> dict[str, Any] | None:
    found = findings.memorised
    if found is None:
        return None
    return {"doubted": found.doubted, "predicted": found.predicted, "is_so": found.is_so}


def _notes_of_labels(
    task: Task, samples: Samples, findings: Findings, classes: _Classes
) -> list[str]:
    """Says why labels are not judged, where they are not."""
    if samples.free is None:
        return []
    if samples.target is None:
        return ["the spec has neither target nor label: labels are not judged"]
    if not (samples.usable & samples.comparable).any():
        return ["no sample has a finite loss and gradient: labels are not judged"]
    sizes = np.bincount(samples.target[samples.target >= 0])
    if not len(sizes):
        return ["no sample has a label that is a class: labels are not judged"]
    if (sizes > 0).sum() < 2:
        return ["all samples have the same label: there is nothing to compare it with"]
    notes = []
    if findings.labels is None:
        notes.append("no two classes have two samples each: labels are not judged")
    elif findings.labels.expected is None:
        notes.append(
            "the gradients hardly tell the classes apart, so the number of wrong labels is not estimated: "
            "train the model first, or check that labels and inputs belong together"
        )
    alone = [classes.names.get(int(n), str(n)) for n in np.flatnonzero(sizes == 1)]
    if alone and findings.labels is not None:
        which = ", ".join(alone[:5]) + (", ..." if len(alone) > 5 else "")
        notes.append(f"classes with a single sample cannot be judged: {which}")
    return notes


def _notes(task: Task, batch_sizes: dict[int, int]) -> list[str]:
    notes = notes_of_mode(task.spec.model)
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
