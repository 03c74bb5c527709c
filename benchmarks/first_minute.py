"""Times the first audit of a new user: a process of its own, three lines, 10,000 samples of digits' size.

Run as ``python -m benchmarks.first_minute``; ``--store`` keeps the row. The process imports pergrad, loads a
trained convnet and its data, audits them and writes the report. Wall and CPU time of the whole process count,
from its start to its end, with two threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import RESULTS, file_name, provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import mislabelled_digits as digits

LINES = """
import pergrad, torch
model, dataset = torch.load("subject.pt", weights_only=False)
print(pergrad.Audit.run(model, dataset, "audit").report())
"""


def subject(samples: int, seed: int) -> tuple[torch.nn.Module, Any]:
    """Returns a convnet after one epoch, and digits with noise, repeated to the number of samples."""
    data = digits.digits_with_flips(0.05, seed)
    model = digits.convnet(seed)
    for _ in digits.training(model, data, epochs=1, seed=seed):
        pass
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(samples) % len(data.images)
    images = data.images[rows]
    images = images + 0.05 * torch.randn(images.shape, generator=generator)
    return model, torch.utils.data.TensorDataset(images, data.given[rows])


def measured(samples: int, threads: int, seed: int) -> dict[str, Any]:
    """Runs the three lines in a process of their own; returns its seconds, and those of its report."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(subject(samples, seed), Path(folder) / "subject.pt")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", LINES],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(done.stderr)
        report = Path(folder) / done.stdout.strip().splitlines()[-1]
        summary = json.loads((Path(folder) / "audit/summary.json").read_text())
        used = [getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime")]
        return {
            "samples": samples,
            "threads": threads,
            "wall_seconds": wall,
            "cpu_seconds": sum(used),
            "report_bytes": report.stat().st_size,
            "seconds": summary["seconds"],
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", action="store_true", help="keep the row")
    options = parser.parse_args(arguments)
    found = measured(options.samples, options.threads, options.seed)
    wall, used = found["wall_seconds"], found["cpu_seconds"]
    print(f"{found['samples']:,} samples: {wall:.1f} s, {used:.1f} s of CPU time")
    if options.store:
        made = provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=1, seed=options.seed)
        name = file_name("first_minute", "float32", made).replace("jsonl", "json")
        path = RESULTS / "audit_cost" / name
        path.write_text(json.dumps({"provenance": asdict(made), **found}) + "\n")
        print(path.relative_to(RESULTS.parent))


if __name__ == "__main__":
    main()
