"""Results folders for the tests of reports, written as an audit writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from pergrad.attribution import Findings, Samples, analyse, grade
from pergrad.audit.writing.results import FORMAT, write_tables


def write_folder(
    folder: Path,
    samples: Samples,
    *,
    labels: Sequence[str] | None = None,
    show: Callable[[int], Image.Image | str] | None = None,
    known_wrong: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    **changes: Any,
) -> Path:
    """The files of an audit of these samples; `changes` replace entries of the summary."""
    findings = analyse(samples, names=None if classes is None else dict(enumerate(classes)))
    folder.mkdir(parents=True, exist_ok=True)
    names = {} if classes is None else dict(enumerate(classes))
    write_tables(folder, samples, findings, labels, names)
    summary = _summary(samples, findings)
    if known_wrong is not None:
        graded = grade(samples.index, findings.suspicion, samples.loss, known_wrong)
        summary["grade"] = graded.as_json()
    (folder / "summary.json").write_text(json.dumps({**summary, **changes}))
    if show is not None:
        rows = [shown_row(index, show(index)) for index in findings.worth_showing().tolist()]
        pq.write_table(pa.Table.from_pylist(rows, schema=SHOWN), folder / "shown.parquet")
    return folder


SHOWN = pa.schema(
    [
        *(("index", pa.int64()), ("text", pa.string()), ("mode", pa.string())),
        *(("width", pa.int32()), ("height", pa.int32()), ("pixels", pa.binary())),
    ]
)


def shown_row(index: int, found: Image.Image | str) -> dict[str, Any]:
    """A row of `shown.parquet`."""
    if isinstance(found, str):
        return {"index": index, "text": found}
    size = {"width": found.width, "height": found.height}
    return {
        "index": index,
        "text": None,
        "mode": found.mode,
        **size,
        "pixels": found.tobytes(),
    }


def _summary(samples: Samples, findings: Findings) -> dict[str, Any]:
    def plain(values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)

    return {
        "format": FORMAT,
        "pergrad": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "sketch_dim": samples.sketch.shape[1],
        "batch_size": 256,
        "samples": len(samples),
        "model": {"name": "Sequential", "parameters": 6410, "fingerprint": "9f2c1ab34e77d0c1"},
        "dataset": {
            "name": "digits with flips",
            "size": len(samples),
            "fingerprint": "51d0b7e29a3c8846",
            "subset": None,
        },
        "groups": [
            {"name": name, "parameters": 100 * (n + 1), "share": part}
            for n, (name, part) in enumerate(findings.dominant_groups.items())
        ],
        "norm": plain(findings.quantiles["norm"]),
        "loss": plain(findings.quantiles["loss"]),
        "noise_scale": findings.noise_scale,
        "critical_batch_size": findings.critical_batch_size,
        "noise": {"low": findings.noise.low, "high": findings.noise.high},
        "duplicates": findings.duplicates.count,
        "duplicate_groups": int(findings.duplicates.group.max(initial=0)),
        "ranked_by": "loss" if findings.labels is None else "labels",
        "label_errors": None
        if findings.labels is None
        else {
            name: getattr(findings.labels, name) for name in ("expected", "low", "high", "skill")
        },
        "memorised": None,
        "skipped": [],
        "seconds": {"streaming": 0.31, "analysis": 0.12, "writing": 0.05},
        "samples_per_second": 5796.8,
        "command": "pergrad audit my_project.train:audit_spec",
        "notes": [],
    }


def clustered(samples: int = 300, *, wrong: int = 15, classes: int = 4, seed: int = 0) -> Samples:
    """Gradients of a model that has learned its classes but for a few samples that are wrong.

    Those come first: sample n < `wrong` pulls against the class after its own, n % classes.
    """
    generator = np.random.default_rng(seed)
    centres = 4 * generator.normal(size=(classes, 24))
    own = np.arange(samples) % classes
    rows = 0.05 * centres[own] + 0.1 * generator.normal(size=(samples, 24))
    rows[:wrong] = -2 * centres[(own[:wrong] + 1) % classes] + generator.normal(size=(wrong, 24))
    norm = np.linalg.norm(rows, axis=1)
    groups = {
        "conv": np.linalg.norm(rows[:, :8], axis=1),
        "head": np.linalg.norm(rows[:, 8:], axis=1),
    }
    loss = 0.1 * norm * generator.uniform(0.8, 1.2, size=samples)
    return Samples(np.arange(samples), loss, norm, groups, rows)


CLASSES = [str(n) for n in range(10)]


def doubted(
    folder: Path, *, settled: bool = False, names: Sequence[str] = CLASSES, **options: Any
) -> Path:
    """A classifier's audit of 400 samples of ten classes; the sevens 7, 17, ... 117 are labelled 7
    but look like 1.

    Samples 200 and 201 are copies of sample 199. If settled, the labels of the twelve sevens are put right.
    """
    generator = np.random.default_rng(0)
    own = np.arange(400) % 10
    looks = own.copy()
    wrong = np.arange(7, 120, 10)
    looks[wrong] = 1
    centres = 2 * generator.normal(size=(10, 24))
    free = centres[looks] + generator.normal(size=(400, 24))
    free[200:202] = free[199]
    given = own.copy()
    given[200:202] = given[199]
    looks[200:202] = looks[199]
    if settled:
        given[wrong] = 1
    base = clustered(400, wrong=0)
    chance = np.full((400, 2), 0.9)
    samples = Samples(
        *(base.index, base.loss, base.norm, base.group_norms, base.sketch),
        *(free[:, None, :], given, looks, chance),
    )
    labels = [names[n] for n in given]
    return write_folder(folder, samples, labels=labels, classes=list(names), **options)
