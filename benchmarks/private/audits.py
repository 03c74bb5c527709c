"""Audits private training end to end: sound runs must stay below their epsilon, planted bugs must not.

`python -m benchmarks.private.audits --workers 16` writes benchmarks/results/private/audits.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks.private.results import in_processes, write
from pergrad.private import selftest

__all__ = ["main"]


Found = dict[str, tuple[float, float, bool]]


def found(seed: int) -> Found:
    """Returns the value found, the limit, and whether a bug was planted, for each kind of training."""
    torch.set_num_threads(1)
    return {f.name: (f.found, f.limit, f.planted) for f in selftest(seed)}


def found_in_sound_training(seed: int) -> Found:
    """Returns the same for training without a bug, which comes first."""
    torch.set_num_threads(1)
    first = next(selftest(seed))
    return {first.name: (first.found, first.limit, first.planted)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--planted", type=int, default=10, help="runs that plant bugs, too")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--output", default="audits.json", help="file in benchmarks/results/private"
    )
    chosen = parser.parse_args(arguments)
    seeds = range(1000, 1000 + 10 * chosen.runs, 10)
    all_runs = in_processes(found, seeds[: chosen.planted], chosen.workers)
    all_runs += in_processes(found_in_sound_training, seeds[chosen.planted :], chosen.workers)
    rows = []
    for name, (_, limit, is_planted) in all_runs[0].items():
        values = [run[name][0] for run in all_runs if name in run]
        above = sum(value > limit for value in values)
        rows.append(
            {
                "training": name,
                "planted": is_planted,
                "limit": limit,
                "runs": len(values),
                "above": above,
                "found": values,
            }
        )
        print(f"{name:40} above {limit:g} in {above} of {len(values)}; largest {max(values):.3f}")
    write(chosen.output, torch.device("cpu"), {"runs": chosen.runs, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
