"""Measures the analysis of an audit's rows: seconds and peak memory at 20,000 rows and at 200,000.

Run as ``python -m benchmarks.analysis``; ``--store`` keeps the rows. Each size runs in a process of its own,
whose peak resident memory counts, with Python and torch; 1% of the rows are near-duplicates of others.
``loss`` analyses sketches of gradients alone, ``labels`` also label-free sketches of ten classes, of which 2%
are wrong.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.rows import RESULTS, Row, file_name, provenance, write
from pergrad.attribution import Samples, analyse

KINDS = ("loss", "labels")
_CLASSES, _CENTRES = 10, 50
_BLOCK = 4096
_COPIED = 100  # one of so many rows is a copy with noise
_WRONG = 50  # one of so many labels is wrong


def sketches(rows: int, dim: int, seed: int) -> np.ndarray:  # (rows, dim) float32
    """Draws rows around fifty centres; the last hundredth are copies of the first with noise of 5%."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(_CENTRES, dim)).astype(np.float32)
    found = np.empty((rows, dim), dtype=np.float32)
    for start in range(0, rows, _BLOCK):
        part = found[start : start + _BLOCK]
        part[:] = generator.normal(size=part.shape)
        part += 0.7 * centres[generator.integers(0, _CENTRES, len(part))]
    copies = rows // _COPIED
    noise = generator.normal(size=(copies, dim)).astype(np.float32)
    found[rows - copies :] = found[:copies] + 0.05 * noise
    return found


def samples(kind: str, rows: int, dim: int, seed: int) -> tuple[Samples, np.ndarray]:
    """Returns the input of an analysis, and a mask of the wrong labels."""
    sketch = sketches(rows, dim, seed)
    norm = np.sqrt(np.einsum("nk,nk->n", sketch, sketch, dtype=np.float64))
    generator = np.random.default_rng(seed + 1)
    wrong = generator.random(rows) < 1 / _WRONG
    index = np.arange(rows)
    if kind == "loss":
        return Samples(index, norm, norm, {"all": norm}, sketch), wrong
    truth = generator.integers(0, _CLASSES, rows)
    truth[rows - rows // _COPIED :] = truth[: rows // _COPIED]
    free = sketches(rows, dim, seed + 2)
    free[np.arange(rows), truth] += 6
    given = np.where(wrong, (truth + 1) % _CLASSES, truth)
    chances = np.full((rows, 2), 0.5)
    return (
        Samples(index, norm, norm, {"all": norm}, sketch, free[:, None], given, truth, chances),
        wrong,
    )


def measured(kind: str, rows: int, dim: int, seed: int) -> dict[str, Any]:
    """Analyses once, in this process; returns seconds, memory and what was found."""
    made, wrong = samples(kind, rows, dim, seed)
    began = time.perf_counter()
    found = analyse(made)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    note = f"{found.duplicates.count} pairs of near-duplicates, {rows // _COPIED} planted"
    if found.labels is not None:
        first = np.argsort(-found.labels.doubt)[: int(wrong.sum())]
        note += f"; {int(wrong[first].sum())} of {int(wrong.sum())} wrong labels ranked first"
    recall = getattr(found.duplicates, "recall", None)
    if recall is not None:
        note += f"; {recall}"
    return {"seconds": seconds, "peak_bytes": peak, "note": note}


def row(kind: str, rows: int, dim: int, seed: int, threads: int) -> Row:
    """Measures in a process of its own."""
    line = [sys.executable, "-m", "benchmarks.analysis", "--alone", kind]
    line += ["--rows", str(rows), "--dim", str(dim), "--seed", str(seed), "--threads", str(threads)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    torch.set_num_threads(threads)
    return Row(
        size="cpu",
        precision="float32",
        model=f"rows-{rows}-{dim}",
        model_title=f"{rows:,} rows of {dim} numbers",
        method=kind,
        method_title={"loss": "gradients of the loss", "labels": "label-free gradients too"}[kind],
        quantity="analysis",
        status="ok",
        note=found["note"],
        seconds=found["seconds"],
        seconds_iqr=None,
        fastest=found["seconds"],
        ratio=None,
        ratio_iqr=None,
        peak_bytes=found["peak_bytes"],
        memory_ratio=None,
        provenance=provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=1, seed=seed),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 200_000])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the rows")
    parser.add_argument("--alone", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.alone is not None:
        torch.set_num_threads(options.threads)
        found = measured(options.alone, options.rows[0], options.dim, options.seed)
        print(json.dumps(found))
        return
    rows = [
        row(kind, size, options.dim, options.seed, options.threads)
        for size in options.rows
        for kind in options.kinds
    ]
    for r in rows:
        print(
            f"{r.model_title:30} {r.method_title:26} {r.seconds:7.1f} s"
            f" {(r.peak_bytes or 0) / 1e9:6.2f} GB  {r.note}"
        )
    if options.store:
        path = RESULTS / "analysis" / file_name("cpu", "float32", rows[0].provenance)
        write(path, rows)
        print(path.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
