"""Measures exact and approximate search of an index: seconds, memory, recall.

Rows are random numbers with a decaying spectrum, as those of gradients are, in a store of the same format
as a build writes; queries are other draws, divided by the damped second moment as those of an index are. Run
as `python -m benchmarks.index_search --rows 1000000 --approximate`.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import machine, versions
from pergrad.index.querying.approximate import Coarse
from pergrad.index.querying.scoring import Best, best_of
from pergrad.index.store.chunks import Chunk, Facts
from pergrad.index.store.manifest import Manifest, Part
from pergrad.index.store.store import Store

__all__ = ["main"]

_CHUNK = 4096


def made(path: Path, rows: int, width: int) -> Store:
    """Writes a store of random rows whose entries decay as 1 / √(1 + n)."""
    identity = {
        "models": ["none"],
        "loss": "none",
        "projection": "count",
        "dim": width,
        "seed": 0,
        "dtype": "float16",
        "per": "sample",
        "compute_dtype": "float32",
        "device": "cpu",
    }
    part = Part(0, rows, 0, rows, "none", "random")
    manifest = Manifest(identity, (part,), _CHUNK, _CHUNK, rows, width)
    store = Store.begin(path, manifest)
    generator = torch.Generator().manual_seed(0)
    spectrum = (1 + torch.arange(width)).rsqrt()
    pool = torch.randn(4 * _CHUNK, width, generator=generator) * spectrum
    for start in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - start)
        # Mixing a pool is faster than drawing all numbers, and no two rows are the same.
        chosen = torch.randint(0, len(pool), (2, count), generator=generator)
        values = (0.8 * pool[chosen[0]] + 0.6 * pool[chosen[1]]) / 8
        number = np.ones((count, 1))
        index = np.arange(start, start + count)
        facts = Facts(index, number, number, number.astype(np.float32))
        store.add(Chunk((start, start + count), values.half().numpy(), facts))
    return Store(path)


def preconditioned(count: int, width: int, seed: int) -> torch.Tensor:
    """Draws queries from the distribution of the rows, divided by their damped second moment.

    The damping is the index's default, one mean eigenvalue of 512 numbers. Returns (count, 1, width).
    """
    generator = torch.Generator().manual_seed(seed)
    variance = 1 / (1 + torch.arange(width)) / 64
    rows = torch.randn(count, width, generator=generator) * variance.sqrt()
    return (rows / (variance + variance.sum() / 512))[:, None]


def shared(exact: tuple[Best, Best], near: tuple[Best, Best]) -> float:
    """Returns the share of the best rows, high and low, that an approximate search finds."""
    pairs = [
        (set(a), set(b))
        for wanted, found in zip(exact, near, strict=True)
        for a, b in zip(wanted.rows.tolist(), found.rows.tolist(), strict=True)
    ]
    return sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)


def measured(store: Store, width: int, count: int, *, approximate: bool) -> list[dict[str, Any]]:
    """Times the exact search of `count` queries and, on request, the approximate one."""
    queries = preconditioned(count, width, 1)
    times, expected = [], best_of(store, queries, 10)
    for _ in range(3):
        began = time.perf_counter()
        expected = best_of(store, queries, 10)
        times.append(time.perf_counter() - began)
    row = {
        "what": "top 10 of an index, exact",
        "rows": len(store),
        "width": width,
        "dtype": "float16",
        "queries": count,
        "seconds": times,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "threads": torch.get_num_threads(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if not approximate:
        return [row]
    began = time.perf_counter()
    coarse = Coarse(store, preconditioned(32, width, 2))
    making = time.perf_counter() - began
    times = []
    for _ in range(3):
        began = time.perf_counter()
        coarse.best(queries, 10)
        times.append(time.perf_counter() - began)
    others = preconditioned(32, width, 3)  # the recall that is printed was measured with 32 others
    fresh = shared(best_of(store, others, 10), coarse.best(others, 10))
    near = {
        "what": "top 10 of an index, approximate",
        "seconds": times,
        "seconds_to_make": making,
        "recall": coarse.recall,
        "recall_of_other_queries": fresh,
        "recall_of_the_first": shared(expected, coarse.best(queries, 10)),
        "candidates": coarse.factor * 10,
        "bytes_on_disk": (store.path / "approximate.f16").stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    return [row, {**row, **near}]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument(
        "--path", type=Path, default=None, help="keep the rows here, and reuse them"
    )
    parser.add_argument("--approximate", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.path or Path(folder)
        if not (path / "index.json").exists():
            made(path, options.rows, options.width)
        store = Store(path)
        len(store)  # reads the facts
        rows = measured(store, options.width, options.queries, approximate=options.approximate)
        text = json.dumps(rows, indent=1)
        print(text)
        if options.output is not None:
            options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
