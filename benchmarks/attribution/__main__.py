"""Measures LDS and planted facts of pergrad's index, of baselines and of other libraries on the same models.

Run as ``python -m benchmarks.attribution --store``; ``--only digits`` selects tasks and ``--seeds 1`` one
seed. The peers (kronfluence, dattri, traker) are measured where they are installed. A task is an MLP on
scikit-learn's digits after 15 and 60 epochs, an MLP on Gaussian quantiles, a convnet on digits, and a
transformer on sentences with planted facts. Each seed trains a model on all samples, with five
checkpoints, and three models on each of 100 random halves. Options of the index are its defaults
everywhere: nothing was chosen by the queries.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attribution.data import TASKS
from benchmarks.rows import RESULTS, provenance
from pergrad.evaluate import Evaluation, facts, lds
from pergrad.evaluate.gradients import GRADIENTS
from pergrad.evaluate.peers import PEERS

FOLDER = RESULTS / "attribution"
_MODULES = {"kronfluence": "kronfluence", "dattri": "dattri", "traker": "trak"}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(TASKS), help="tasks")
    parser.add_argument("--epochs", type=int, nargs="+", help="epochs, instead of the task's own")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each task")
    parser.add_argument("--subsets", type=int, default=100, help="random halves of each seed")
    parser.add_argument("--repeats", type=int, default=3, help="models trained on each half")
    parser.add_argument("--store", action="store_true", help="keep the results")
    return parser.parse_args(argv)


def installed_peers() -> list[str]:
    """Returns the columns of peers that are installed."""
    return [name for name in PEERS if find_spec(_MODULES[name.partition(",")[0]]) is not None]


def measured(
    name: str, epochs: int, *, seeds: int, subsets: int, repeats: int, peers: Sequence[str]
) -> list[Evaluation]:
    """Returns the LDS of a task and, where facts are planted, how often the planted sample comes first."""
    found: list[Evaluation] = []
    first: list[Evaluation] = []
    methods = [*GRADIENTS, *peers]
    for seed in range(seeds):
        made = TASKS[name][0](
            epochs, seed
        )  # data of its own, so that queries differ from seed to seed
        found.append(lds(methods, made.task, subsets=subsets, repeats=repeats, seeds=[seed]))
        if made.planted is not None:
            first.append(facts(methods, made.task, made.planted, seeds=[seed]))
        print(f"{name}, {epochs} epochs, seed {seed}\n{found[-1]}", flush=True)
    return [joined(found), *([joined(first)] if first else [])]


def joined(parts: Sequence[Evaluation]) -> Evaluation:
    """Joins evaluations of one seed each, whose queries differ."""
    names = [name for name in parts[0] if all(name in part.values for part in parts)]
    values = {name: np.concatenate([part.values[name] for part in parts]) for name in names}
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    about = {**parts[0].about, "seeds": len(parts)}
    return Evaluation(parts[0].name, values, about, notes, paired=False)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    peers = installed_peers()
    for name in chosen.only or TASKS:
        for epochs in chosen.epochs or TASKS[name][1]:
            began = time.perf_counter()
            run = provenance(
                torch.device("cpu"), of_commit=None, rounds=1, steps=epochs, seed=chosen.seeds
            )
            evaluations = measured(
                name,
                epochs,
                seeds=chosen.seeds,
                subsets=chosen.subsets,
                repeats=chosen.repeats,
                peers=peers,
            )
            seconds = time.perf_counter() - began
            for evaluation in evaluations:
                print(f"{name}, {epochs} epochs\n{evaluation}", flush=True)
            print(f"{seconds:.0f} s", flush=True)
            if chosen.store:
                stored = {
                    "task": name,
                    "epochs": epochs,
                    "seconds": round(seconds),
                    "provenance": asdict(run),
                    "evaluations": [evaluation.as_json() for evaluation in evaluations],
                    "against kronfluence": against(evaluations[0]),
                }
                path = FOLDER / f"{name}-{epochs}.json"
                write(path, stored)
                print(path.relative_to(RESULTS.parent))
    return 0


def against(evaluation: Evaluation, own: str = "index") -> dict[str, Any]:
    """Returns the difference of the index and each column of kronfluence, query by query."""
    found = {}
    for name in evaluation:
        if name.startswith("kronfluence"):
            gap = evaluation.difference(own, name)
            found[name] = {"mean": gap.mean, "low": gap.low, "high": gap.high}
    return found


def write(path: Path, stored: Mapping[str, Any]) -> None:
    """Stores the results of a task; replaces those of an earlier run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
