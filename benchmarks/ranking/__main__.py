"""Measures how well an audit finds planted errors, against the loss and cleanlab's normalised margin.

Run as ``python -m benchmarks.ranking --workers 2 --store``; ``--only digits`` selects data sets, and
``--seeds 1`` one seed. A cell is a data set, a kind of label noise and a seed; each is measured undertrained,
well trained and memorised. At least half of the cells have data sets or noises that were not used to choose
the method. The margin is that of five-fold cross-validation: the model is trained five more times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from benchmarks.ranking.cells import Cell, cells, computed
from benchmarks.ranking.data import DATA
from benchmarks.ranking.table import tables
from benchmarks.rows import RESULTS, file_name, provenance


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each data set and noise")
    parser.add_argument("--only", nargs="+", choices=list(DATA), help="data sets")
    parser.add_argument("--noises", nargs="+", help="noises; 'planted' for outliers and duplicates")
    parser.add_argument("--store", action="store_true", help="keep the cells")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = options(argv)
    console = Console(width=110)
    wanted = [
        cell
        for cell in cells(chosen.seeds)
        if (chosen.only is None or cell.data in chosen.only)
        and (chosen.noises is None or cell.noise in chosen.noises)
    ]
    made = provenance(torch.device("cpu"), of_commit=None, rounds=1, steps=1, seed=0)
    began, found = time.perf_counter(), []
    for number, rows in enumerate(_all(wanted, chosen.workers), 1):
        found += rows
        if number % 20 == 0 or number == len(wanted):
            print(
                f"{number} of {len(wanted)} cells, {time.perf_counter() - began:.0f} s", flush=True
            )
    for table in tables(found):
        console.print(table)
    if chosen.store:
        path = RESULTS / "ranking" / file_name("ranking", "float32", made).replace("jsonl", "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"provenance": asdict(made), "cells": found}) + "\n")
        print(path.relative_to(RESULTS.parent))
    return 0


def _all(wanted: list[Cell], workers: int) -> Iterator[list[dict[str, Any]]]:
    if workers <= 1:
        yield from map(computed, wanted)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(computed, wanted)


if __name__ == "__main__":
    sys.exit(main())
