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
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from benchmarks.attribution.data import TASKS
from benchmarks.attribution.storing import path_of, store
from benchmarks.rows import RESULTS, provenance
from pergrad.evaluate import Evaluation, facts, lds
from pergrad.evaluate.gradients import GRADIENTS
from pergrad.evaluate.peers import PEERS

_MODULES = {"kronfluence": "kronfluence", "dattri": "dattri", "traker": "trak"}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(TASKS), help="tasks")
    parser.add_argument("--epochs", type=int, nargs="+", help="epochs, instead of the task's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    parser.add_argument("--subsets", type=int, default=100, help="random halves of each seed")
    parser.add_argument("--repeats", type=int, default=3, help="models trained on each half")
    parser.add_argument("--store", action="store_true", help="keep the results")
    return parser.parse_args(argv)


def installed_peers() -> list[str]:
    """Returns the columns of peers that are installed."""
    return [name for name in PEERS if find_spec(_MODULES[name.partition(",")[0]]) is not None]


def measured(
    name: str, epochs: int, seed: int, *, subsets: int, repeats: int, peers: Sequence[str]
) -> list[Evaluation]:
    """Returns the LDS of a task and, where facts are planted, how often the planted sample comes first.

    A seed draws its own data, so that queries differ from seed to seed.
    """
    methods = [*GRADIENTS, *peers]
    made = TASKS[name][0](epochs, seed)
    found = [lds(methods, made.task, subsets=subsets, repeats=repeats, seeds=[seed])]
    if made.planted is not None:
        found.append(facts(methods, made.task, made.planted, seeds=[seed]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    peers = installed_peers()
    wanted = [
        (name, epochs, seed)
        for name in chosen.only or TASKS
        for epochs in chosen.epochs or TASKS[name][1]
        for seed in chosen.seeds
    ]
    for name, epochs, seed in wanted:
        run = provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=epochs, seed=seed)
        began = time.perf_counter()
        sizes = {"subsets": chosen.subsets, "repeats": chosen.repeats}
        found = measured(name, epochs, seed, **sizes, peers=peers)
        seconds = round(time.perf_counter() - began)
        for evaluation in found:
            print(f"{name}, {epochs} epochs, seed {seed}, {seconds} s\n{evaluation}", flush=True)
        if chosen.store:
            store(name, epochs, seed, found, run, seconds)
            print(path_of(name, epochs, seed).relative_to(RESULTS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
