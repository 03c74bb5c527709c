"""Computes what an audit on many GPUs costs, from measured parts: time, network and disk.

Run as ``python -m benchmarks.scale`` for the tables of docs/howto/scale.md, with ``--write`` to put them
there; ``--measure --store`` measures the parts that run on CPUs again: rows on disk, hashes, and the queue.
The other parts are stored rows: recorded steps on a GPU, and the analysis (`benchmarks.analysis`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rows import RESULTS, Row, provenance, read
from pergrad.audit.streaming.chunks import Chunk, read_chunk, write_chunk
from pergrad.audit.streaming.fingerprint import checksum_of_model, fingerprint_of_model
from pergrad.audit.streaming.gradients import Rows

PAGE = Path(__file__).parents[1] / "docs/howto/scale.md"
GPUS, TOKENS, LENGTH = 64, 1_000_000_000, 512
SKETCH, GROUPS = 256, 12
STEP = 16 * 512  # tokens of the measured step: GPT-2-small shape, B=16 T=512
SMALL, LARGE = 124_000_000, 7_000_000_000  # parameters: the measured model, and one that is sharded
LINK = 50e9  # bytes a second into one GPU: 400 Gbit/s
_ROWS = 8192  # of a chunk that is written and read
_MARKS = ("<!-- benchmarks.scale -->", "<!-- end -->")


def measured() -> dict[str, float]:
    """Measures the parts that run on CPUs: seconds per row, per byte and per call."""
    generator = np.random.default_rng(0)
    loss, norm = generator.normal(size=(2, _ROWS))
    rows = Rows(
        loss,
        norm,
        generator.normal(size=(_ROWS, GROUPS)),
        generator.normal(size=(_ROWS, SKETCH)).astype(np.float32),
    )
    chunk = Chunk(0, _ROWS, np.arange(_ROWS), rows, None, 1024, {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write = _fastest(lambda: write_chunk(path, chunk))
        (file,) = path.glob("*.npz")
        size = file.stat().st_size
        back = _fastest(lambda: read_chunk(file))
    model = nn.Linear(4096, 4096, bias=False)
    held = model.weight.nbytes
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    claims = 1000
    claimed = _fastest(lambda: [store.add("next", 1) for _ in range(claims)])
    return {
        "bytes_per_row": size / _ROWS,
        "write_per_row": write / _ROWS,
        "read_per_row": back / _ROWS,
        "hash_per_byte": _fastest(lambda: fingerprint_of_model(model)) / held,
        "checksum_per_byte": _fastest(lambda: checksum_of_model(model)) / held,
        "claim": claimed / claims,
    }


def _fastest(run: Any, rounds: int = 5) -> float:
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def stored() -> dict[str, Any]:
    """Returns the latest measured parts: of this script, a recorded step on a GPU, and the analysis."""
    (*_, own) = sorted((RESULTS / "scale").glob("*.json"))
    (*_, steps) = sorted(RESULTS.glob("gpu-bfloat16-eager-transformer-*.jsonl"))
    (*_, analysed) = sorted((RESULTS / "analysis").glob("*.jsonl"))
    step = _row(steps, lambda row: row.quantity == "grads" and "record" in row.method_title)
    analysis = _row(analysed, lambda row: row.model == "rows-200000-256" and row.method == "loss")
    return {
        **json.loads(own.read_text()),
        "step": step.seconds,
        "analysis": analysis.seconds,
        "machines": [step.provenance.machine, analysis.provenance.machine],
    }


def _row(path: Path, wanted: Any) -> Row:
    return next(row for row in read(path) if wanted(row))


def costs(parts: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Returns seconds, bytes through the network and bytes on disk of each part of the audit."""
    samples = TOKENS // LENGTH
    weights = 4 * SMALL
    items = 16 * GPUS
    return {
        "gradients, on all GPUs": {"seconds": TOKENS / STEP * parts["step"] / GPUS},
        "loading tokens": {"network": 8.0 * TOKENS, "seconds": 8.0 * TOKENS / GPUS / LINK},
        "queue": {"seconds": items * parts["claim"], "network": 100.0 * items},
        "writing rows": {
            "seconds": samples * parts["write_per_row"] / GPUS,
            "network": samples * parts["bytes_per_row"],
            "disk": samples * parts["bytes_per_row"],
        },
        "hash of the model, in one process": {"seconds": weights * parts["hash_per_byte"]},
        "checksums of the model, in each process": {
            "seconds": weights * parts["checksum_per_byte"]
        },
        "reading rows, in one process": {
            "seconds": samples * parts["read_per_row"],
            "network": samples * parts["bytes_per_row"],
        },
        "analysis, in one process": {"seconds": parts["analysis"] * (samples / 200_000) ** 1.5},
    }


def sharded(parts: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of a model that is sharded: compute by its size, and gathering its weights."""
    steps = TOKENS / STEP / GPUS
    return {
        "compute": steps * parts["step"] * LARGE / SMALL,
        "gather": steps * 2 * 2 * LARGE / LINK,  # forward and backward, two bytes a weight
        "bytes": steps * 2 * 2 * LARGE,
    }


def tables(parts: dict[str, Any]) -> str:
    """Returns the tables of the page, as Markdown."""
    found = costs(parts)
    total = sum(part.get("seconds", 0.0) for part in found.values())
    lines = ["| part | time | share | network | disk |", "|---|---|---|---|---|"]
    for name, part in found.items():
        seconds = part.get("seconds", 0.0)
        lines.append(
            f"| {name} | {_seconds(seconds)} | {seconds / total:.0%} "
            f"| {_bytes(part.get('network'))} | {_bytes(part.get('disk'))} |"
        )
    sums = {key: sum(p.get(key, 0.0) for p in found.values()) for key in ("network", "disk")}
    lines.append(
        f"| **all** | **{_seconds(total)}** | | **{_bytes(sums['network'])}** "
        f"| **{_bytes(sums['disk'])}** |"
    )
    worst = max(found, key=lambda name: found[name].get("seconds", 0.0))
    share = found[worst]["seconds"] / total
    large = sharded(parts)
    lines += [
        "",
        f"The bottleneck is **{worst}**: {share:.0%} of the time.",
        "",
        f"A model of 7e9 parameters, sharded over the {GPUS} GPUs, takes {_seconds(large['compute'])} of "
        f"compute and {_seconds(large['gather'])} of gathers if they do not overlap: each GPU receives "
        f"{_bytes(large['bytes'])}. Its bottleneck is "
        f"{'compute' if large['compute'] > large['gather'] else 'the network'}.",
    ]
    return "\n".join(lines)


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    if value >= 90:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 0.1 else f"{value * 1e3:.2g} ms"


def _bytes(value: float | None) -> str:
    if not value:
        return ""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1e3:.0f} kB"


def page(text: str, found: str) -> str:
    """Replaces the tables in the text of the page."""
    first, last = map(re.escape, _MARKS)
    return re.sub(f"{first}.*{last}", f"{_MARKS[0]}\n{found}\n{_MARKS[1]}", text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the parts that run on CPUs")
    parser.add_argument("--store", action="store_true", help="keep what was measured")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args(arguments)
    if options.measure:
        torch.set_num_threads(1)
        made = provenance(torch.device("cpu"), of_commit=None, rounds=5, steps=1, seed=0)
        found = {**measured(), "provenance": asdict(made)}
        print(json.dumps({k: v for k, v in found.items() if k != "provenance"}, indent=1))
        if options.store:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            path = RESULTS / "scale" / f"cpu-{stamp}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(path.relative_to(RESULTS.parent))
        return
    text = tables(stored())
    print(text)
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), text))


if __name__ == "__main__":
    main()
