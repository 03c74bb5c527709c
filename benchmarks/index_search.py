"""Measures exact and approximate search of an index: seconds, memory, recall.

Rows are random numbers with a decaying spectrum, as those of gradients are, in a store of the same format
as a build writes; queries are rows of a model of its own. Run as `python -m benchmarks.index_search --rows
1000000`.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import pergrad
from pergrad.index.querying.approximate import Graph
from pergrad.index.querying.scoring import best_of
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--path", type=Path, default=None)
    parser.add_argument("--approximate", action="store_true")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.path or Path(folder)
        store = (
            Store(path)
            if (path / "index.json").exists()
            else made(path, options.rows, options.width)
        )
        len(store)  # reads the facts
        generator = torch.Generator().manual_seed(1)
        queries = torch.randn(options.queries, 1, options.width, generator=generator)
        queries = queries * (1 + torch.arange(options.width)).rsqrt()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            best_of(store, queries, 10)
            times.append(time.perf_counter() - began)
        row = {
            "what": "top 10 of an index, exact",
            "rows": len(store),
            "width": options.width,
            "dtype": "float16",
            "queries": options.queries,
            "seconds": times,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "threads": torch.get_num_threads(),
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.version.__version__,
            "pergrad": pergrad.__version__,
        }
        rows = [row]
        if options.approximate:
            began = time.perf_counter()
            graph = Graph(store)
            making = time.perf_counter() - began
            began = time.perf_counter()
            graph.best(queries, 10)
            rows.append(
                {
                    **row,
                    "what": "top 10 of an index, approximate",
                    "seconds": [time.perf_counter() - began],
                    "seconds_to_make": making,
                    "recall": graph.recall,
                    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                }
            )
        text = json.dumps(rows, indent=1)
        print(text)
        if options.output is not None:
            options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
