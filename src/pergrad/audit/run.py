"""An audit from its spec to its results folder: begin or resume, stream, analyse, write."""

from __future__ import annotations

import json
import platform
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pergrad
from pergrad.attribution import Findings, Samples, analyse, grade
from pergrad.audit.chunks import Chunk, gaps, kept_spans, read_all
from pergrad.audit.dtypes import own_dtype, placed
from pergrad.audit.fingerprint import (
    fingerprint_of_data,
    fingerprint_of_loss,
    fingerprint_of_model,
)
from pergrad.audit.folder import ResultsFolder
from pergrad.audit.gradients import Gradients
from pergrad.audit.loading import Loader, drawing_from
from pergrad.audit.losses import loss_of_samples
from pergrad.audit.memory import bytes_kept, fitting_batch_size, free_bytes
from pergrad.audit.options import AuditOptions, chosen_device, chosen_indices
from pergrad.audit.ranks import Ranks, joined_ranks
from pergrad.audit.results import write_summary, write_tables
from pergrad.audit.shown import write_shown
from pergrad.audit.spec import Spec, grouped_parameters
from pergrad.audit.stream import Stream, Watch, batches_in, shard
from pergrad.errors import AuditError, PergradError

__all__ = ["run_audit"]

_PROBED = 2  # samples whose forward tells what one of them keeps


class _Silent:
    def begin(self, samples: int, done: int) -> None: ...
    def advance(self, samples: int) -> None: ...
    def say(self, message: str) -> None: ...


@dataclass(frozen=True)
class _Task:
    """What is audited, as every process finds it out for itself."""

    spec: Spec
    options: AuditOptions
    device: torch.device
    indices: np.ndarray
    groups: dict[str, list[str]]
    model_fingerprint: str
    data_fingerprint: str
    data_repeats: bool

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for an audit to go on."""
        dtype = self.options.dtype or str(own_dtype(self.spec.model)).removeprefix("torch.")
        return {
            "model": self.model_fingerprint,
            "dataset": self.data_fingerprint,
            "loss": fingerprint_of_loss(self.spec.loss),
            "groups": list(self.groups),
            "subset": self.options.subset,
            "seed": self.options.seed,
            "sketch_dim": self.options.sketch_dim,
            "dtype": dtype,
            "device": self.device.type,
            "batch_size": self.options.batch_size,
        }


def run_audit(
    spec: Spec,
    folder: str | Path,
    options: AuditOptions | None = None,
    *,
    command: str | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Audits the samples and writes all but the report into the folder; returns the summary.

    Where the folder holds a part of the same audit, it goes on from there; where it holds all of it, there
    is nothing to do. Under `torchrun` every process computes a part, and the first one writes the results.

    Args:
        spec: what to audit.
        folder: where the results go; new, empty, or of the same audit.
        options: how.
        command: what the user has typed, for the summary.
        watch: is told how far the audit has come.

    >>> import tempfile, torch
    >>> from torch.utils.data import TensorDataset
    >>> from pergrad.audit import Spec, run_audit
    >>> data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    >>> spec = Spec(torch.nn.Linear(3, 1), data, lambda model, x, y: (model(x) - y).square().sum(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = run_audit(spec, folder)
    >>> summary["samples"]
    8
    """
    options = options or AuditOptions()
    watch = watch or _Silent()
    results = ResultsFolder(Path(folder))
    with joined_ranks() as ranks:
        ranks.together(results.open)
        with results.locked() if ranks.is_first else nullcontext():
            task = ranks.together(lambda: _task(spec, options, ranks))
            _refuse_different_ranks(task, ranks)
            batch_size = ranks.first_decides(lambda: _begun(results, task, ranks))
            if batch_size is not None:
                _stream(results, task, ranks, batch_size, watch)
                ranks.all_agree(None)  # all have written
                if ranks.is_first:
                    _finish(results, task, ranks, command)
            return ranks.first_decides(lambda: _summary_in(results))


def _task(spec: Spec, options: AuditOptions, ranks: Ranks) -> _Task:
    device = chosen_device(options.device, ranks.local)
    groups = grouped_parameters(spec)
    indices = chosen_indices(options.subset, len(spec.dataset), options.seed)
    of_data, repeats = fingerprint_of_data(spec.dataset, options.seed)
    of_model = fingerprint_of_model(spec.model)
    return _Task(spec, options, device, indices, groups, of_model, of_data, repeats)


def _refuse_different_ranks(task: _Task, ranks: Ranks) -> None:
    for number, identity in enumerate(ranks.all_agree(task.identity)):
        for key, value in identity.items():
            if value != task.identity[key]:
                raise AuditError(
                    f"processes {ranks.number} and {number} have another {key}: seed whatever the "
                    "reference draws, so that every process makes the same"
                )


def _begun(results: ResultsFolder, task: _Task, ranks: Ranks) -> int | None:
    """The batch size of an audit that begins or goes on, or None where it has been finished."""
    about = results.open()
    if about is not None and (results.is_finished or kept_spans(results.chunks)):
        identity = dict(task.identity)
        if identity["batch_size"] in (None, about["batch_size"]):
            identity["batch_size"] = about["identity"]["batch_size"]
        results.refuse_another(about, identity)
        return None if results.is_finished else results.batch_size(about)
    # Nothing is lost where an audit has ended before its first rows, such as by an error in the spec.
    size = task.options.batch_size or _found_batch_size(task, ranks)
    size = min(size, len(task.indices))
    results.begin({"pergrad": pergrad.__version__, "identity": task.identity, "batch_size": size})
    return size


def _model(task: _Task) -> nn.Module:
    return placed(task.spec.model, task.device, task.options.dtype)


def _gradients(task: _Task, model: nn.Module) -> Gradients:
    options = task.options
    return Gradients(
        model, task.spec, task.groups, sketch_dim=options.sketch_dim, seed=options.seed
    )


def _found_batch_size(task: _Task, ranks: Ranks) -> int:
    model = _model(task)
    count = min(_PROBED, len(task.indices))
    loaded = Loader(task.spec, task.indices, task.options.seed).load(0, count)
    arguments = _gradients(task, model).arguments(loaded.arguments)

    with drawing_from(task.options.seed, 0):
        kept = bytes_kept(model, lambda: loss_of_samples(task.spec.loss, model, arguments, count))
    free = free_bytes(task.device) // (ranks.count if task.device.type == "cpu" else 1)
    return fitting_batch_size(-(-kept // count), free, len(task.indices))


def _stream(
    results: ResultsFolder, task: _Task, ranks: Ranks, batch_size: int, watch: Watch
) -> None:
    options = task.options
    # Before any process adds to the chunks.
    left = ranks.first_decides(lambda: gaps(kept_spans(results.chunks), len(task.indices)))
    mine = shard(batches_in(left, batch_size), ranks.number, ranks.count)
    whole = shard(batches_in([(0, len(task.indices))], batch_size), ranks.number, ranks.count)
    watched = sum(stop - start for start, stop in whole)
    watch.begin(watched, max(0, watched - sum(stop - start for start, stop in mine)))
    stream = Stream(
        results,
        Loader(task.spec, task.indices, options.seed),
        _gradients(task, _model(task)),
        task.indices,
        seed=options.seed,
        workers=options.workers,
        save_every=options.save_every,
        watch=watch,
    )
    stream.run(mine, batch_size)


def _finish(results: ResultsFolder, task: _Task, ranks: Ranks, command: str | None) -> None:
    """Analyse all rows and write the results, the summary last."""
    began = time.perf_counter()
    whole, batch_sizes = read_all(results.chunks, task.indices)
    rows = whole.rows
    samples = Samples(
        whole.index,
        rows.loss,
        rows.norm,
        dict(zip(task.groups, np.ascontiguousarray(rows.group_norms.T), strict=True)),
        rows.sketch,
    )
    findings = analyse(samples)
    analysed = time.perf_counter()
    write_tables(results.path, samples, findings, whole.labels)
    shown = findings.worth_showing(top=task.options.shown)
    notes = write_shown(results.path / "shown", task.spec, shown)
    written = time.perf_counter()
    seconds = {**whole.seconds, "analysis": analysed - began, "writing": written - analysed}
    notes += _notes(task, batch_sizes)
    summary = {
        **_how(task, ranks, whole, command),
        **_what(task, samples, findings),
        "seconds": seconds,
        "samples_per_second": len(samples) / max(seconds["streaming"] / ranks.count, 1e-9),
        "batch_sizes": batch_sizes,
    }
    try:
        if task.spec.known_wrong is not None:
            known = task.spec.known_wrong
            graded = grade(samples.index, findings.suspicion, samples.loss, known)
            summary["grade"] = graded.as_json()
    except PergradError as error:
        notes.append(f"no grade: {error}")
    write_summary(results.path, {**summary, "notes": notes})


def _how(task: _Task, ranks: Ranks, whole: Chunk, command: str | None) -> dict[str, Any]:
    is_gpu = task.device.type == "cuda"
    return {
        "format": 1,
        "pergrad": pergrad.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(task.device) if is_gpu else task.device.type,
        "threads": torch.get_num_threads(),
        "processes": ranks.count,
        "dtype": task.identity["dtype"],
        "seed": task.options.seed,
        "sketch_dim": task.options.sketch_dim,
        "batch_size": whole.batch_size,
        "command": command,
    }


def _what(task: _Task, samples: Samples, findings: Findings) -> dict[str, Any]:
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


def _notes(task: _Task, batch_sizes: dict[int, int]) -> list[str]:
    notes = []
    if len(batch_sizes) > 1:
        parts = ", ".join(
            f"{rows} samples in batches of {size}" for size, rows in batch_sizes.items()
        )
        notes.append(
            f"memory ran out on the way: {parts}; another batch size may change the last digits"
        )
    if not task.data_repeats:
        notes.append(
            "items of the data set differ from one reading to the next, so that its fingerprint is of its "
            "type and length alone, and what is shown may differ from what was audited"
        )
    return notes


def _summary_in(results: ResultsFolder) -> dict[str, Any]:
    path = results.path / "summary.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise AuditError(
            f"{path} is corrupt ({type(error).__name__}: {error}): remove this file, and the same command "
            "writes it again"
        ) from error
